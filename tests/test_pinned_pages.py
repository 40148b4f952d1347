"""Pages in pinned host memory: what of it a machine without a GPU can show."""

from __future__ import annotations

import logging
import math
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from test_saved_tensors import compressor, noise
from tiny import nothing_held, restored, save

from daf_hf import packing, pinned_pages
from daf_hf.codecs import GENERAL
from daf_hf.kernels import get_backend
from daf_hf.packing import choose_packer
from daf_hf.pinned_pages import PinnedPages

CPU = torch.device("cpu")


class Brings(PinnedPages):
    """Brings elements from a device that is the CPU, late."""

    def __init__(self):
        super().__init__(get_backend(), CPU)
        self.complete = threading.Event()

    def bring(self, flat):
        elements = torch.full_like(flat, float("nan"))

        def wait():
            assert self.complete.wait(20)
            elements.copy_(flat)

        return elements, wait

    def synchronize(self):
        pass


@pytest.fixture
def remote(monkeypatch):
    """A compressor whose elements have to be brought to the host."""
    monkeypatch.setattr(packing, "SMALLEST_BYTES", 1)
    daf = compressor(packing="host")
    packer = daf.placement.packer
    packer._pinned = brings = Brings()
    daf.placement._pages = packer.pages = brings
    return daf, brings


def test_elements_are_brought_before_they_are_encoded(remote):
    daf, brings = remote
    x, odd = noise(64, 64), noise(64, 64)
    odd[1, 1] = float("nan")
    with daf.scope():
        y, out = save(x, odd)
    assert daf.placement.waiting_bytes == x.nbytes + odd.nbytes
    brings.complete.set()
    y.backward()
    assert torch.equal(out[0], restored(x, GENERAL, 8))
    assert torch.equal(out[1].view(torch.int32), odd.view(torch.int32))
    del y
    assert nothing_held(daf)


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_kernels_that_address_pages_serve_pinned_ones(name, monkeypatch):
    used = []

    class Kernels:
        def __init__(self):
            self.name = name

        def encode(self, *args):
            used.append("encode")
            return get_backend().encode(*args)

        def decode(self, *args):
            used.append("decode")
            return get_backend().decode(*args)

    pages = PinnedPages(Kernels(), CPU)
    x = noise(64, 64)
    assert torch.equal(restored(x, GENERAL, 4, pages), restored(x, GENERAL, 4))
    assert used == (["encode", "decode"] if name == "triton" else [])


@pytest.mark.parametrize("faster", [True, False])
def test_auto_on_a_gpu_takes_what_is_faster(faster, monkeypatch):
    monkeypatch.setattr(packing, "host_is_faster", lambda *_: faster)
    packer = choose_packer("auto", torch.device("cuda", 0), get_backend())
    assert (packer is not None) == faster
    assert choose_packer("device", torch.device("cuda", 0), get_backend()) is None


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="packing='host' cannot serve mps: use"):
        choose_packer("host", torch.device("mps"), get_backend())
    assert choose_packer("auto", torch.device("mps"), get_backend()) is None


class Stream:
    """Notes what is asked of it."""

    def __init__(self, *_):
        self.asked = []

    def wait_stream(self, other):
        self.asked.append("wait for what was launched")

    def record_event(self):
        self.asked.append("note the end")
        return SimpleNamespace(synchronize=lambda: self.asked.append("wait for the end"))


@pytest.fixture
def fake_cuda(monkeypatch):
    """Just as much of CUDA as is called."""
    empty, copy_ = torch.empty, torch.Tensor.copy_
    stream = Stream()

    def noting_copy(to, source, non_blocking=False):
        stream.asked.append("copy" if non_blocking else "copy and wait")
        return copy_(to, source)

    for name, value in {
        "Stream": lambda device: stream,
        "current_stream": lambda device: None,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device: None,
        "get_device_properties": lambda device: SimpleNamespace(is_integrated=1),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr(torch.Tensor, "copy_", noting_copy)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, s: s.asked.append("keep until"))
    return stream


def test_elements_are_copied_after_what_was_launched(fake_cuda):
    x = noise(64, 64)
    elements, wait = PinnedPages(get_backend(), CPU).bring(x)
    wait()
    assert torch.equal(elements, x)
    assert elements.data_ptr() != x.data_ptr()
    assert fake_cuda.asked == [
        "wait for what was launched",
        "copy",
        "keep until",
        "note the end",
        "wait for the end",
    ]


@pytest.mark.parametrize("slower", ["device", "host"])
def test_what_is_faster_is_measured_once(slower, fake_cuda, monkeypatch, caplog):
    monkeypatch.setattr(pinned_pages, "SAMPLE_ELEMENTS", 1 << 12)
    seconds = iter([2.0, 1.0] if slower == "device" else [1.0, 2.0])
    really = pinned_pages._seconds

    def measured(*args):
        assert 0 < really(*args) < math.inf
        return next(seconds)

    monkeypatch.setattr(pinned_pages, "_seconds", measured)
    caplog.set_level(logging.INFO, logger="daf_hf")
    pinned_pages.host_is_faster.cache_clear()
    for _ in range(2):
        assert pinned_pages.host_is_faster(CPU, get_backend()) == (slower == "device")
    pinned_pages.host_is_faster.cache_clear()
    assert len(caplog.messages) == 1
    assert "cpu (integrated)" in caplog.text
