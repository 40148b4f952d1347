"""The host's malloc: make freed memory really go back."""

from __future__ import annotations

import ctypes
import logging
import platform
from functools import cache

logger = logging.getLogger("daf_hf")

_M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 1 << 20
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


def trim_malloc() -> bool:
    """Give glibc's free memory back to the system, below its mmap threshold too.

    Returns:
        Whether any was given back.
    """
    libc = _glibc()
    return libc is not None and bool(libc.malloc_trim(0))


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, where it is glibc and its malloc is in use."""
    if platform.libc_ver()[0] != "glibc":
        logger.debug("daf_hf: the C library is not glibc; malloc is left alone")
        return None
    process = ctypes.CDLL(None)
    other = next((name for name in _OTHER_ALLOCATORS if hasattr(process, name)), None)
    if other is not None:
        logger.info("daf_hf: another allocator is loaded (%s); malloc is left alone", other)
        return None
    return process
