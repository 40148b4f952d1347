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

_ALIGNMENT = 4096

_use_count = getattr(torch._C, "_storage_Use_Count", None)


class Workspace:
    """Blocks of host memory, which are handed out in slices.

    A slice is a tensor with a storage of its own, and free once nothing else refers to that. Idle
    blocks go when none has room for a request, or when the largest is taken as a whole: the moment
    of the largest tensor is that of the highest peak. So there is never more than was in use at
    once, and a large tensor's block serves the smaller ones before and after it. Not thread-safe:
    the caller holds a lock.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised flat tensor."""
        nbytes = numel * dtype.itemsize
        if nbytes < SMALLEST_BYTES or device.type != "cpu" or _use_count is None:
            return torch.empty(numel, dtype=dtype, device=device)
        for block in self._blocks:  # the smallest first
            found = block.slice(nbytes)
            if found is not None:
                if block is self._blocks[-1] and nbytes > block.nbytes // 2:
                    self._blocks = [each for each in self._blocks if not each.is_idle]
                return found.view(dtype)
        block = _Block(nbytes)
        kept = [each for each in self._blocks if not each.is_idle]
        self._blocks = sorted([*kept, block], key=lambda each: each.nbytes)
        found = block.slice(nbytes)
        assert found is not None
        return found.view(dtype)

    def clear(self) -> None:
        """Let all blocks go; those in use end with the last tensor that refers to them."""
        self._blocks.clear()


class _Block:
    """Memory for slices, of which each is as long as the tensor in it."""

    def __init__(self, nbytes: int) -> None:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        advise_huge_pages(memory)
        self.nbytes = nbytes
        self._memory = memory.numpy()
        self._slices: list[tuple[int, int, Tensor]] = []  # first and end, in their order
        self._idle = (0, 0)

    @property
    def is_idle(self) -> bool:
        """Whether nobody has a slice of it."""
        self._forget()
        return not self._slices

    def slice(self, nbytes: int) -> Tensor | None:
        """So many bytes that nobody else has; None where there is no gap of that size."""
        self._forget()
        place, start = 0, 0
        for first, end, _ in self._slices:
            if first - start >= nbytes:
                break
            place, start = place + 1, -(-end // _ALIGNMENT) * _ALIGNMENT
        if self.nbytes - start < nbytes:
            return None
        # A storage of its own, as views of one could not be told apart.
        found = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=start)
        self._slices.insert(place, (start, start + nbytes, found))
        if not self._idle[0]:
            del found  # what counts as idle: the references that the list itself holds
            self._idle = _references(self._slices[place][2])
        return self._slices[place][2][:]  # another reference to its storage

    def _forget(self) -> None:
        """Free the slices that nobody has any more."""
        idle = self._idle
        self._slices = [
            each
            for each in self._slices
            if any(now > then for now, then in zip(_references(each[2]), idle, strict=True))
        ]


def _references(tensor: Tensor) -> tuple[int, int]:
    """References to a tensor's storage, and to the Python object that stands for it."""
    assert _use_count is not None
    storage = tensor.untyped_storage()
    return _use_count(storage._cdata), sys.getrefcount(storage)
