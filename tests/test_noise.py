"""Dropout's noise from a state of the generator: torch's own, and the native backend's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import dropout

from daf_hf.kernels import cpu, cpu_status, noise, reference
from daf_hf.kernels.noise import STATE_BYTES, TorchStream, streams

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ISAS = cpu.load().isas if cpu_status().available else ()


@pytest.fixture(params=ISAS or [pytest.param("", marks=pytest.mark.skip("not built"))])
def native(request):
    backend = cpu.load()
    active = backend.isa
    backend.use_isa(request.param)
    yield backend
    backend.use_isa(active)


def serial():
    """Whether this torch draws element by element, which is what native code can do too."""
    return noise._agrees(cpu.load())


def state_after(words, seed=0):
    """A generator's state when so many words were drawn from it."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(words):
        torch.empty(1, dtype=torch.int32).random_(generator=generator)
    return generator.get_state()


def test_the_state_has_the_size_that_is_counted():
    assert torch.default_generator.get_state().nbytes == STATE_BYTES


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.05, 0.123])
def test_a_stream_is_what_dropout_multiplies_by(dtype, p):
    torch.manual_seed(3)
    state = torch.default_generator.get_state()
    expected = dropout(torch.ones(70, 33, dtype=dtype), p)
    drawn = torch.empty(70 * 33, dtype=dtype)
    TorchStream(state, 1 - p).fill(drawn)
    assert torch.equal(drawn, expected.flatten())


def test_the_state_is_not_changed(native):
    state = state_after(5)
    before = state.clone()
    for begin in (TorchStream, native.noise):
        begin(state, 0.9).fill(torch.empty(2000))
        assert torch.equal(state, before)


@given(
    words=st.integers(0, 1300),
    numel=st.one_of(st.integers(0, 8), st.integers(300, 320), st.integers(0, 3000)),
    keep=st.one_of(st.sampled_from([0.9, 0.5, 0.1, 1 - 1e-9]), st.floats(0.001, 0.999)),
    dtype=st.sampled_from(FLOATS),
    cuts=st.lists(st.integers(1, 700), max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_native_streams_are_torchs_in_any_parts(words, numel, keep, dtype, cuts):
    if not ISAS or not serial():
        pytest.skip("this torch draws in another way, or the native backend was not built")
    state = state_after(words % 7, seed=words)
    expected = torch.empty(numel, dtype=dtype)
    TorchStream(state, keep).fill(expected)
    backend = cpu.load()
    active = backend.isa
    for isa in ISAS:
        backend.use_isa(isa)
        stream, drawn, start = backend.noise(state, keep), torch.full_like(expected, 7.0), 0
        for cut in (*cuts, numel):
            part = drawn[start : start + cut]
            stream.fill(part)
            start += len(part)
        assert torch.equal(drawn, expected), isa
    backend.use_isa(active)


@pytest.mark.parametrize("words", [0, 1, 2, 623, 624, 625, 1247, 1248])
def test_states_from_anywhere_in_a_block(native, words):
    if not serial():
        pytest.skip("this torch draws in another way")
    state = state_after(words)
    expected, drawn = torch.empty(2, 2001)
    TorchStream(state, 0.7).fill(expected)
    native.noise(state, 0.7).fill(drawn)
    assert torch.equal(drawn, expected)


def test_another_generators_state_is_refused(native):
    for broken in (torch.zeros(STATE_BYTES), torch.full((STATE_BYTES,), 255)):
        with pytest.raises(ValueError, match="Mersenne"):
            native.noise(broken.to(torch.uint8), 0.9)


def test_nothing_but_the_elements_is_written(native):
    poisoned = torch.full((100,), 7.0)
    native.noise(state_after(0), 0.9).fill(poisoned[20:60])
    assert bool((poisoned[:20] == 7).all()) and bool((poisoned[60:] == 7).all())


def test_what_does_not_draw_as_torch_does_is_not_used(native, monkeypatch):
    if serial():
        assert streams(native) == native.noise
    assert streams(reference) is TorchStream
    monkeypatch.setattr(type(native), "noise", lambda *_: TorchStream(state_after(1), 0.5))
    assert streams(native) is TorchStream

    def refuse(*_):
        raise ValueError("not a Mersenne Twister")

    monkeypatch.setattr(type(native), "noise", refuse)
    assert streams(native) is TorchStream
