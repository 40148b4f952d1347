"""Memory for restored tensors, used again and again within a backward pass.

A fresh block of host memory costs a page fault for every 4 KiB when it is first written, which
for large tensors takes longer than restoring them. A block is used again as soon as no tensor
refers to its storage any more, whatever views of it were made.
"""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

SMALLEST_BYTES = 1 << 20
"""Smaller tensors are left to the allocator, which keeps such blocks itself."""

_MADV_HUGEPAGE = 14
_PAGE = 4096
_use_count = getattr(torch._C, "_storage_Use_Count", None)


class Workspace:
    """Blocks of host memory.

    Not thread-safe: the caller holds a lock.

    Args:
        limit_bytes: idle blocks beyond this are let go.
    """

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self._blocks: list[Tensor] = []
        self._idle = (0, 0)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised flat tensor."""
        nbytes = numel * dtype.itemsize
        if nbytes < SMALLEST_BYTES or device.type != "cpu" or _use_count is None:
            return torch.empty(numel, dtype=dtype, device=device)
        block = self._find(nbytes)
        if block is None:
            block = torch.empty(nbytes, dtype=torch.uint8)
            _advise_huge_pages(block)
            if not self._blocks:
                # What counts as idle: the references that the list itself holds.
                self._idle = _references(block)
            self._blocks.append(block)
            self._trim()
        return block[:nbytes].view(dtype)

    def _is_idle(self, block: Tensor) -> bool:
        return all(now <= idle for now, idle in zip(_references(block), self._idle, strict=True))

    def _find(self, nbytes: int) -> Tensor | None:
        """The smallest idle block that is large enough."""
        fitting = [b for b in self._blocks if b.numel() >= nbytes and self._is_idle(b)]
        if not fitting:
            return None
        block = min(fitting, key=Tensor.numel)
        self._blocks = [kept for kept in self._blocks if kept is not block]
        self._blocks.append(block)  # the most recently used is the last
        return block

    def _trim(self) -> None:
        """Let the least recently used idle blocks go until the rest is within the limit."""
        total = sum(block.numel() for block in self._blocks)
        for block in list(self._blocks[:-1]):
            if total <= self.limit_bytes:
                break
            if self._is_idle(block):
                self._blocks = [kept for kept in self._blocks if kept is not block]
                total -= block.numel()

    def clear(self) -> None:
        """Let all blocks go; those in use end with the last tensor that refers to them."""
        self._blocks.clear()


def _references(block: Tensor) -> tuple[int, int]:
    """References to a block's storage, and to the Python object that stands for it."""
    assert _use_count is not None
    storage = block.untyped_storage()
    return _use_count(storage._cdata), sys.getrefcount(storage)


def _advise_huge_pages(block: Tensor) -> None:
    """Ask Linux for huge pages: a fault for 2 MiB instead of one for 4 KiB."""
    if not sys.platform.startswith("linux"):
        return
    start = -(-block.data_ptr() // _PAGE) * _PAGE
    length = (block.data_ptr() + block.numel() - start) // _PAGE * _PAGE
    if length > 0:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(_MADV_HUGEPAGE)
        )
