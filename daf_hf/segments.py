"""Segments of device memory, and their pages: handed out, taken back, moved together.

A segment is taken from the device when pages are missing, and given back when nothing lives in
it. Pages need not be adjacent, so there is no external fragmentation.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from .host_memory import advise_huge_pages
from .kernels.format import PAGE_BYTES, PageSpace

_SEGMENT_BYTES_MAX = 1 << 22
_SEGMENT_BYTES_MIN = 1 << 16
_SEGMENTS_PER_BUDGET = 16
_IDLE_SHARE = 0.04
"""Of the segments, how much must have become free for a look at which of them are empty."""


def segment_pages(budget_bytes: float) -> int:
    """Pages of a full segment under a budget (or inf): a power of two."""
    target = budget_bytes / _SEGMENTS_PER_BUDGET if math.isfinite(budget_bytes) else math.inf
    size = min(max(target, _SEGMENT_BYTES_MIN), _SEGMENT_BYTES_MAX)
    return 1 << int(math.log2(size // PAGE_BYTES))


class Segments:
    """Pages, each of which is free or held.

    What is held is known from *tables*: ``array('i')`` of page numbers, one for each holder. They
    are changed in place when their pages are moved. Not thread-safe: the caller holds a lock.

    Args:
        pages: of a full segment; a power of two.
        device: where segments live.
        before_change: called before what is held is moved, and before segments are given back:
            whoever still reads or writes pages is to be waited for.
        pinned: segments are of pinned host memory.

    Attributes:
        space: where the pages lie.
        nbytes: bytes taken from the device.
        free_pages: pages that nobody holds.
    """

    def __init__(
        self,
        pages: int,
        device: torch.device,
        before_change: Callable[[], object] = lambda: None,
        pinned: bool = False,
    ) -> None:
        self.space = PageSpace(pages)
        self.nbytes = 0
        self._device = device
        self._before_change = before_change
        self._pinned = pinned
        self._stack = np.empty(0, np.int32)  # of free pages, with room for all that there are
        self.free_pages = 0
        self._looked_at = 0  # free pages that were there at the last look, and still are

    # Pages -------------------------------------------------------------------------------------

    @property
    def _free(self) -> np.ndarray:
        """The free pages, those to be taken first at the end."""
        return self._stack[: self.free_pages]

    def take(self, pages: int) -> array[int]:
        """A table of so many of the free pages; there must be as many."""
        first = self.free_pages - pages
        table = array("i", self._stack[first : self.free_pages].tobytes())
        self.free_pages = first
        self._looked_at = min(self._looked_at, first)
        return table

    def give_back(self, table: array[int]) -> None:
        """These pages are free."""
        end = self.free_pages + len(table)
        self._stack[self.free_pages : end] = table
        self.free_pages = end

    def read(self, numbers: Sequence[int] | np.ndarray) -> torch.Tensor:
        """A copy of pages: ``uint8 [pages, PAGE_BYTES]``."""
        per, wanted = self.space.pages_per_segment, np.array(numbers, np.int64)
        out = torch.empty((len(wanted), PAGE_BYTES), dtype=torch.uint8, device=self._device)
        for index in np.unique(wanted // per):
            here = torch.from_numpy(np.flatnonzero(wanted // per == index)).to(self._device)
            rows = torch.from_numpy(wanted[wanted // per == index] % per).to(self._device)
            segment = self.space.segments[index]
            assert segment is not None
            out[here] = segment.view(-1, PAGE_BYTES)[rows]
        return out

    def _copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy pages; neighbours that stay neighbours, as those of a plane mostly do, at once."""
        per, segments = self.space.pages_per_segment, self.space.segments
        if not len(sources):
            return
        step = np.diff(sources)
        same = (step == np.diff(targets)) & (np.abs(step) == 1)
        same &= (np.diff(sources // per) == 0) & (np.diff(targets // per) == 0)
        same[1:] &= step[1:] == step[:-1]  # not one way and then back
        starts = np.flatnonzero(np.concatenate(([True], ~same)))
        ends = np.append(starts[1:], len(sources))
        counts = (ends - starts).tolist()
        sources = np.minimum(sources[starts], sources[ends - 1])
        targets = np.minimum(targets[starts], targets[ends - 1])
        for source, target, count in zip(sources.tolist(), targets.tolist(), counts, strict=True):
            from_, to = segments[source // per], segments[target // per]
            assert from_ is not None and to is not None
            source, target = source % per * PAGE_BYTES, target % per * PAGE_BYTES
            nbytes = count * PAGE_BYTES
            to[target : target + nbytes] = from_[source : source + nbytes]

    # Segments ----------------------------------------------------------------------------------

    def add(self, pages: int) -> None:
        """Take a segment of so many pages from the device."""
        segment = torch.empty(
            pages * PAGE_BYTES, dtype=torch.uint8, device=self._device, pin_memory=self._pinned
        )
        if self._device.type == "cpu" and not self._pinned:
            advise_huge_pages(segment)
        space = self.space
        index = next((i for i, s in enumerate(space.segments) if s is None), len(space.segments))
        if index == len(space.segments):
            space.segments.append(None)
            space.pointers.append(0)
        space.segments[index] = segment
        space.pointers[index] = segment.data_ptr()
        self.nbytes += segment.numel()
        first = index * space.pages_per_segment
        if len(self._stack) < self.nbytes // PAGE_BYTES:
            room = np.empty(2 * self.nbytes // PAGE_BYTES, np.int32)
            room[: self.free_pages] = self._free
            self._stack = room
        end = self.free_pages + pages
        # Low numbers last: a segment is then used from its start.
        self._stack[self.free_pages : end] = np.arange(first + pages - 1, first - 1, -1)
        self.free_pages = end

    def trim_if_idle(self) -> None:
        """Give empty segments back if a good part of what was taken has become free.

        While a backward pass goes on, what it has freed makes room for its gradients. Pinned ones
        stay for now: to give them back is to wait for the device.
        """
        freed = (self.free_pages - self._looked_at) * PAGE_BYTES
        if not self._pinned and freed > _IDLE_SHARE * self.nbytes:
            self.trim()

    def trim(self) -> None:
        """Give back the segments in which nothing lives."""
        sizes = self._sizes()
        empty = np.flatnonzero((sizes == self._free_of(sizes)) & (sizes > 0))
        if len(empty):
            self._before_change()
            self._withdraw(empty)
            self._return(empty)
        self._looked_at = self.free_pages

    def release(self, excess: float, tables: Collection[array[int]]) -> bool:
        """Give back segments of at least ``excess`` bytes, moving what is held together.

        Args:
            excess: bytes.
            tables: all that are held.

        Returns:
            False when so much is not free; some may have been given back all the same.
        """
        sizes = self._sizes()
        free_of = self._free_of(sizes)
        live_of = sizes - free_of
        victims: list[int] = []
        released, to_move, room = 0, 0, self.free_pages
        for index in np.argsort(live_of, kind="stable"):
            if released * PAGE_BYTES >= excess:
                break
            if not sizes[index]:
                continue
            if to_move + live_of[index] > room - free_of[index]:
                break
            victims.append(int(index))
            released += int(sizes[index])
            to_move += int(live_of[index])
            room -= int(free_of[index])
        if victims:
            self._drop(np.array(victims), tables)
        missing = excess - released * PAGE_BYTES
        return missing <= 0 or self._shrink(missing, tables)

    def _shrink(self, excess: float, tables: Collection[array[int]]) -> bool:
        """Give back ``excess`` bytes of free pages that share their segments with held ones.

        The held ones move to new segments of just their size, for a moment beyond the budget.
        """
        if self.free_pages * PAGE_BYTES < excess:
            return False
        sizes, per = self._sizes(), self.space.pages_per_segment
        free_of = self._free_of(sizes)
        order = np.argsort(-free_of, kind="stable")
        enough = int(np.searchsorted(np.cumsum(free_of[order]) * PAGE_BYTES, excess)) + 1
        victims = order[:enough]
        live = int((sizes - free_of)[victims].sum())
        for start in range(0, live, per):
            self.add(min(per, live - start))
        self._drop(victims, tables)
        return True

    def _drop(self, victims: np.ndarray, tables: Collection[array[int]]) -> None:
        """Move what lives in some segments to free pages of the others, and give them back."""
        self._before_change()
        self._withdraw(victims)
        held = [np.frombuffer(table, np.int32) for table in tables if table]
        if held:
            numbers = np.concatenate(held)
            moving = self._are_in(victims, numbers)
            targets = np.frombuffer(self.take(int(moving.sum())), np.int32)
            self._copy(numbers[moving], targets)
            numbers[moving] = targets
            ends = np.cumsum([len(table) for table in held])
            for table, moved in zip(held, np.split(numbers, ends[:-1]), strict=True):
                np.copyto(table, moved)
        self._return(victims)

    def _withdraw(self, victims: np.ndarray) -> None:
        """Offer the free pages of some segments no longer."""
        kept = self._free[~self._are_in(victims, self._free)]
        self.free_pages = len(kept)
        self._free[:] = kept
        self._looked_at = min(self._looked_at, self.free_pages)

    def _are_in(self, segments: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Which pages lie in one of some segments: ``bool``, one a page."""
        chosen = np.zeros(len(self.space.segments), bool)
        chosen[segments] = True
        return chosen[pages // self.space.pages_per_segment]

    def _return(self, victims: np.ndarray) -> None:
        """Give segments back to the device."""
        for index in victims:
            segment = self.space.segments[index]
            assert segment is not None
            self.nbytes -= segment.numel()
            self.space.segments[index] = None
            self.space.pointers[index] = 0

    def _sizes(self) -> np.ndarray:
        """Pages of each place for a segment; 0 where there is none."""
        return np.array(
            [0 if s is None else s.numel() // PAGE_BYTES for s in self.space.segments], np.int64
        )

    def _free_of(self, sizes: np.ndarray) -> np.ndarray:
        """Free pages of each."""
        return np.bincount(self._free // self.space.pages_per_segment, minlength=len(sizes))

    def check(self, tables: Collection[array[int]]) -> None:
        """Assert that every page is free, or in one of the tables once.

        Linear in the number of pages; for tests.
        """
        held = np.concatenate(
            [self._free] + [np.frombuffer(table, np.int32).copy() for table in tables]
        )
        per = self.space.pages_per_segment
        expected = np.concatenate(
            [np.arange(size) + index * per for index, size in enumerate(self._sizes())]
            or [np.zeros(0, np.int64)]
        )
        assert np.array_equal(np.sort(held), expected), "a page is lost or owned twice"
