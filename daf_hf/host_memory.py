"""The host's malloc: make freed memory really go back."""

from __future__ import annotations

import ctypes
import logging
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from torch import Tensor

logger = logging.getLogger("daf_hf")

_M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 1 << 20
SHORT_LIVED_BYTES = 1 << 16
_MADV_HUGEPAGE = 14
_PAGE = 4096
_OTHER_ALLOCATORS = ("mallctl", "je_mallctl", "tc_version", "mi_version", "rpmalloc")


def tune_malloc() -> bool:
    """Have glibc serve blocks of 1 MiB and more by mmap, so that freeing them gives them back.

    By default glibc raises that threshold as it goes, and its heap then fragments: the peak of
    resident memory stays near that of plain training however little is held. The setting is the
    process's and stays; compare with plain training under the same setting.

    Returns:
        Whether it was set. Another C library or a replaced allocator (jemalloc, tcmalloc, ...)
        is left alone.
    """
    libc = _glibc()
    return libc is not None and bool(libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES))


@contextmanager
def short_lived_blocks() -> Iterator[None]:
    """Inside, smaller blocks too are mapped one by one; the heap is trimmed at the end.

    For many medium blocks that all go soon: they would leave holes in the heap, which malloc
    prefers to a mapping also for large blocks, and what is in the heap does not go back.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, SHORT_LIVED_BYTES)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        trim_heap()


def trim_heap() -> None:
    """Give free memory of malloc's heap back to the system; takes some milliseconds."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def advise_huge_pages(block: Tensor) -> None:
    """Ask Linux for huge pages: a fault for 2 MiB instead of one for 4 KiB."""
    if not sys.platform.startswith("linux"):
        return
    start = -(-block.data_ptr() // _PAGE) * _PAGE
    length = (block.data_ptr() + block.numel() - start) // _PAGE * _PAGE
    if length > 0:
        _process().madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(_MADV_HUGEPAGE)
        )


def allocator() -> str:
    """Whose malloc is in use: ``"glibc"``, or by what it is seen to be another's."""
    if platform.libc_ver()[0] != "glibc":
        return "not glibc"
    process = _process()
    other = next((name for name in _OTHER_ALLOCATORS if hasattr(process, name)), None)
    return f"another is loaded ({other})" if other else "glibc"


@cache
def _process() -> ctypes.CDLL:
    """What this process has loaded."""
    return ctypes.CDLL(None)


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, where it is glibc and its malloc is in use."""
    found = allocator()
    if found != "glibc":
        level = logging.DEBUG if found == "not glibc" else logging.INFO
        logger.log(level, "daf_hf: allocator: %s; malloc is left alone", found)
        return None
    return _process()
