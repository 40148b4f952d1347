"""How long codecs take: measured once, and what follows for other sizes."""

from __future__ import annotations

import pytest
import torch

from daf_hf import codec_times
from daf_hf.codec_times import SIZES, CodecTimes
from daf_hf.codecs import GENERAL, parse_codec
from daf_hf.kernels import get_backend

CPU = torch.device("cpu")


@pytest.fixture
def times(monkeypatch):
    """Times under a clock by which a tensor takes 2 us, and an element 1 ns."""
    now = [0.0]
    backend = get_backend("auto", CPU)

    class Kernels:
        calls = 0

        def encode(self, flat, *rest):
            self._take(flat)
            return backend.encode(flat, *rest)

        def decode(self, out, *rest):
            self._take(out)
            backend.decode(out, *rest)

        def _take(self, flat):
            self.calls += 1
            now[0] += 1e-6 + 0.5e-9 * len(flat)

    monkeypatch.setattr(codec_times, "perf_counter", lambda: now[0])
    kernels = Kernels()
    return CodecTimes(kernels, CPU), kernels


@pytest.mark.parametrize("numel", [SIZES[0], 100_000, SIZES[-1], 10 * SIZES[-1]])
def test_seconds_by_size(times, numel):
    expected = 2e-6 + 1e-9 * numel
    assert times[0].seconds(GENERAL, 4, numel, torch.float32) == pytest.approx(expected, rel=0.02)


def test_each_kind_is_measured_once(times):
    measured, kernels = times
    measured.seconds(GENERAL, 4, 1000, torch.float32)
    calls = kernels.calls
    measured.seconds(GENERAL, 4, 999_999, torch.float32)
    assert kernels.calls == calls
    measured.seconds(GENERAL, 2, 1000, torch.float32)
    assert kernels.calls == 2 * calls


def test_slow_kernels_are_not_timed_for_long(times, monkeypatch):
    monkeypatch.setattr(codec_times, "SLOW_SECONDS", 1e-6)
    measured, kernels = times
    seconds = measured.seconds(GENERAL, 4, SIZES[-1], torch.float32)
    assert kernels.calls == 2 * (1 + codec_times.REPEATS)
    assert seconds == pytest.approx(SIZES[-1] / SIZES[0] * (2e-6 + 1e-9 * SIZES[0]))


@pytest.mark.parametrize("name", ["channel+normal", "token+root", "tensor+uniform", "gelu"])
@pytest.mark.parametrize("bits", [0, 2, 8])
def test_the_kernels_that_serve_are_timed(name, bits):
    measured = CodecTimes(get_backend("auto", CPU), CPU)
    small, large = (
        measured.seconds(parse_codec(name), bits, numel, torch.float32) for numel in (4096, 1 << 22)
    )
    assert 0 < small < large < 60
