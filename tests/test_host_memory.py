"""The malloc setting."""

from __future__ import annotations

import platform

import pytest

from daf_hf import host_memory


class Process:
    """A process with a malloc of some kind."""

    def __init__(self, *names):
        self.calls = []
        for name in names:
            setattr(self, name, None)
        self.mallopt = lambda *call: self.calls.append(call) or 1
        self.malloc_trim = lambda pad: self.calls.append(pad) or 1


@pytest.fixture
def process(monkeypatch):
    def make(*names, libc="glibc"):
        process = Process(*names)
        monkeypatch.setattr(host_memory, "_process", lambda: process)
        monkeypatch.setattr(platform, "libc_ver", lambda: (libc, "2.36"))
        host_memory._glibc.cache_clear()
        return process

    yield make
    host_memory._glibc.cache_clear()


def test_glibc_is_told(process):
    glibc = process()
    assert host_memory.tune_malloc()
    assert (-3, 1 << 20) in glibc.calls
    with host_memory.short_lived_blocks():
        assert glibc.calls[-1] == (-3, 1 << 16)
    assert glibc.calls[-2:] == [(-3, 1 << 20), 0]


@pytest.mark.parametrize("name", ["mallctl", "je_mallctl", "tc_version", "mi_version"])
def test_another_allocator_is_left_alone(process, name):
    other = process(name)
    assert not host_memory.tune_malloc()
    with host_memory.short_lived_blocks():
        pass
    assert not other.calls


@pytest.mark.parametrize("libc", ["musl", ""])
def test_another_c_library_is_left_alone(process, libc):
    other = process(libc=libc)
    assert not host_memory.tune_malloc()
    with host_memory.short_lived_blocks():
        pass
    assert not other.calls


def test_here_it_does_not_fail():
    assert host_memory.tune_malloc() in (True, False)
    with host_memory.short_lived_blocks():
        pass
