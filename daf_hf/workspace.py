"""Memory for restored tensors, used again and again within a backward pass.

A fresh block of host memory costs a page fault for every 4 KiB when it is first written, which
for large tensors takes longer than restoring them. A block is used again as soon as no tensor
refers to its storage any more, whatever views of it were made.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from .host_memory import advise_huge_pages

SMALLEST_BYTES = 1 << 20
"""Smaller tensors are left to the allocator, which keeps such blocks itself."""

_use_count = getattr(torch._C, "_storage_Use_Count", None)


class Workspace:
    """Blocks of host memory.

    A block serves anything that fits into it; idle ones go when none of them can serve a request,
    or when the largest does. So there are never more blocks than were in use at once. Not
    thread-safe: the caller holds a lock.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._idle = (0, 0)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised flat tensor."""
        nbytes = numel * dtype.itemsize
        if nbytes < SMALLEST_BYTES or device.type != "cpu" or _use_count is None:
            return torch.empty(numel, dtype=dtype, device=device)
        idle = [block for block in self._blocks if self._is_idle(block)]
        fitting = [block for block in idle if block.numel() >= nbytes]
        if fitting:
            block = min(fitting, key=Tensor.numel)
            if block.numel() == max(map(Tensor.numel, self._blocks)):
                # The moment of the largest tensor is that of the highest peak.
                self._let_go([other for other in idle if other is not block])
            return block[:nbytes].view(dtype)
        self._let_go(idle)
        block = torch.empty(nbytes, dtype=torch.uint8)
        advise_huge_pages(block)
        if not self._blocks:
            # What counts as idle: the references that the list itself holds.
            self._idle = _references(block)
        self._blocks.append(block)
        return block[:nbytes].view(dtype)

    def _let_go(self, idle: list[Tensor]) -> None:
        self._blocks = [block for block in self._blocks if all(block is not i for i in idle)]

    def _is_idle(self, block: Tensor) -> bool:
        return all(now <= idle for now, idle in zip(_references(block), self._idle, strict=True))

    def clear(self) -> None:
        """Let all blocks go; those in use end with the last tensor that refers to them."""
        self._blocks.clear()


def _references(block: Tensor) -> tuple[int, int]:
    """References to a block's storage, and to the Python object that stands for it."""
    assert _use_count is not None
    storage = block.untyped_storage()
    return _use_count(storage._cdata), sys.getrefcount(storage)
