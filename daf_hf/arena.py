"""The paged arena: pages, segments, the budget, and the order of demotion.

Pages need not be adjacent, so there is no external fragmentation. The budget caps everything
that is held for the backward pass: pages, page tables, and the exact bytes that others hold
(:meth:`Arena.reserve_outside`). Segments are taken from the device as they are needed and given
back when the budget shrinks or exact bytes need the room.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch
from sortedcontainers import SortedList

from .host_memory import advise_huge_pages
from .kernels.format import GROUP, GROUPS_PER_PAGE, PAGE_BYTES, Granularity, Layout, PageSpace
from .spill import Parcel

TABLE_ENTRY_BYTES = 4
PAGE_COST = PAGE_BYTES + TABLE_ENTRY_BYTES
"""Bytes that one page takes out of the budget: itself and its entry in a page table."""

PAGE_ELEMENTS = GROUPS_PER_PAGE * GROUP
"""Elements of which one page holds a plane."""

PART_PAGES = 128
"""Pages of a plane that are read at a time, where parts of a tensor will do."""

_PART = PART_PAGES * PAGE_ELEMENTS
_SEGMENT_BYTES_MAX = 1 << 22
_SEGMENT_BYTES_MIN = 1 << 16
_SEGMENTS_PER_BUDGET = 16
_IDLE_SHARE = 0.04
"""Of the segments, how much must have become free for a look at which of them are empty."""


class Stored:
    """One encoded activation: its layout, width and page table.

    Attributes:
        layout: how the table is divided.
        bits: planes that are stored.
        table: ``array('i')`` of page numbers.
        widths: widths it may be demoted to, ascending; the first is its floor.
        costs: ``costs[b]`` is the predicted cost of storing it at ``b`` bits (0..8).
        spills: planes that leave the arena are kept elsewhere, so it may go below its floor.
        spilled: these planes, least significant first: how many, and where they are.
    """

    __slots__ = (
        *("__weakref__", "bits", "costs", "layout", "rank", "spilled", "spills", "table"),
        "widths",
    )

    def __init__(
        self, layout: Layout, bits: int, widths: Sequence[int], costs: Sequence[float]
    ) -> None:
        self.layout = layout
        self.bits = bits
        self.widths = widths
        self.costs = costs
        self.table = array("i")
        self.rank: tuple[float, int, Stored] | None = None
        self.spills = False
        self.spilled: list[tuple[int, Parcel]] = []

    def part_starts(self) -> range:
        """Positions of the first elements of the parts in which it can be read.

        Where elements share no statistics but the tensor's, a part of the pages says all of a
        part of the elements.
        """
        layout = self.layout
        step = layout.numel if layout.units > 1 else _PART
        return range(0, max(layout.numel, 1), max(step, 1))

    def part(self, start: int) -> Stored:
        """One of its parts, as long as its pages stay where they are; for reading alone."""
        layout = self.layout
        if len(self.part_starts()) == 1:
            return self
        numel = min(_PART, layout.numel - start)
        part = dataclasses.replace(layout, numel=numel, cols=1, granularity=Granularity.TENSOR)
        stored = Stored(part, self.bits, self.widths, self.costs)
        fixed = layout.statistics_pages
        stored.table.extend(self.table[:fixed])
        for plane in range(self.bits):
            first = fixed + plane * layout.plane_pages + start // PAGE_ELEMENTS
            stored.table.extend(self.table[first : first + part.plane_pages])
        return stored

    def lower(self) -> int | None:
        """The next lower width, None at the floor (without planes, where these are spilled)."""
        below = [width for width in self.widths if width < self.bits]
        if not below and self.spills and self.bits and self.costs:
            below = [0]
        return below[-1] if below and self.layout.plane_pages else None

    def demotion_score(self) -> float:
        """Cost per page freed of demoting it by one width (inf at the floor)."""
        lower = self.lower()
        if lower is None:
            return math.inf
        pages = (self.bits - lower) * self.layout.plane_pages
        return (self.costs[lower] - self.costs[self.bits]) / pages


class Arena:
    """Pages under a budget.

    Not thread-safe: the caller holds a lock.

    Args:
        limit_bytes: the budget, or inf.
        device: where segments live.
        before_change: called before what is live is demoted or moved, and before segments are
            given back: whoever still reads or writes pages is to be waited for.
        pinned: segments are of pinned host memory.

    Attributes:
        spill: takes the planes that are dropped, as a flat tensor of their pages, and says where
            they are; None where it has no room. Without it they are lost.
    """

    def __init__(
        self,
        limit_bytes: float,
        device: torch.device | str = "cpu",
        before_change: Callable[[], object] = lambda: None,
        pinned: bool = False,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.device = torch.device(device)
        self.pinned = pinned
        self.spill: Callable[[torch.Tensor], Parcel | None] | None = None
        self._before_change = before_change
        target = limit_bytes / _SEGMENTS_PER_BUDGET if math.isfinite(limit_bytes) else math.inf
        size = min(max(target, _SEGMENT_BYTES_MIN), _SEGMENT_BYTES_MAX)
        self.space = PageSpace(1 << int(math.log2(size // PAGE_BYTES)))
        self.outside_bytes = 0
        self.reserved_bytes = 0
        self.used_pages = 0
        self.demotions = 0
        self.demoted_pages = 0
        self.limits_set = 0
        self.stored_elements = 0
        self.stored_bits = 0
        self._free = array("i")
        self._looked_at = 0  # free pages that were there at the last look, and still are
        self._live: set[Stored] = set()
        self._order: SortedList = SortedList()
        self._unranked: dict[Stored, None] = {}  # of the live ones, in order of their insertion
        self._serial = 0

    # What is held ------------------------------------------------------------------------------

    @property
    def stored_bytes(self) -> int:
        """Bytes of live pages and of their page tables."""
        return self.used_pages * PAGE_COST

    @property
    def held_bytes(self) -> int:
        """All bytes that count against the budget."""
        return self.used_pages * PAGE_COST + self.outside_bytes

    @property
    def room_bytes(self) -> float:
        """Bytes that may be held more with all segments staying where they are."""
        return self.limit_bytes - self._footprint()

    def fits(self, pages: int, outside: int = 0) -> bool:
        """Whether so many more pages and outside bytes stay within the budget."""
        return self.held_bytes + pages * PAGE_COST + outside <= self.limit_bytes

    def __len__(self) -> int:
        return len(self._live)

    # Insertion and removal ---------------------------------------------------------------------

    def insert(self, stored: Stored) -> bool:
        """Give ``stored`` the pages of its width; False (and nothing done) without room."""
        pages = stored.layout.pages(stored.bits)
        if not self.fits(pages) or not self._grow_to(pages):
            return False
        if pages:
            stored.table = self._free[-pages:]
            del self._free[-pages:]
            self._looked_at = min(self._looked_at, len(self._free))
            self.used_pages += pages
        stored.spills = self.spill is not None
        self._live.add(stored)
        self._unranked[stored] = None
        self.stored_elements += stored.layout.numel
        self.stored_bits += stored.layout.numel * stored.bits
        return True

    def remove(self, stored: Stored) -> None:
        """Free the pages of ``stored``."""
        self._unranked.pop(stored, None)
        if stored.rank is not None:
            self._order.remove(stored.rank)
            stored.rank = None
        self._live.discard(stored)
        self.stored_elements -= stored.layout.numel
        self.stored_bits -= stored.layout.numel * stored.bits
        self._give_back(stored, 0)

    def reserve_outside(self, nbytes: int) -> bool:
        """Count ``nbytes`` held outside the arena; False (and nothing done) without room."""
        if not self.fits(0, nbytes):
            return False
        excess = self._footprint() + nbytes - self.limit_bytes
        if excess > 0 and not self._release_segments(excess):
            return False
        self.outside_bytes += nbytes
        return True

    def release_outside(self, nbytes: int) -> None:
        """Uncount what :meth:`reserve_outside` counted."""
        self.outside_bytes -= nbytes

    # Demotion ----------------------------------------------------------------------------------

    def cheapest_demotion(self) -> float:
        """Cost per page of the cheapest demotion of a live activation (inf: none is left)."""
        self._rank_all()
        return self._order[0][0] if self._order else math.inf

    def demote_cheapest(self) -> None:
        """Drop the planes whose loss costs least per page; their pages are free at once."""
        self._before_change()
        self._rank_all()
        score, _, stored = self._order.pop(0)
        stored.rank = None
        lower = stored.lower()
        assert lower is not None, score
        if stored.spills and not self._spill_planes(stored, lower):
            stored.spills = False
            return self._rank(stored)  # to be dropped at its turn, as far as it may be
        self.stored_bits -= stored.layout.numel * (stored.bits - lower)
        self.demoted_pages += (stored.bits - lower) * stored.layout.plane_pages
        stored.bits = lower
        self._give_back(stored, stored.layout.pages(lower))
        self.demotions += 1
        self._rank(stored)

    def _rank_all(self) -> None:
        """Rank what was inserted since the last demotion: most steps need no rank of anything."""
        for stored in self._unranked:
            self._rank(stored)
        self._unranked.clear()

    def _spill_planes(self, stored: Stored, lower: int) -> bool:
        """Keep the planes above a width elsewhere; False where they have no room there."""
        assert self.spill is not None
        pages = self.read_pages(stored.table[stored.layout.pages(lower) :])
        try:
            parcel = self.spill(pages.view(-1))
        except OSError:
            self._rank(stored)
            raise
        if parcel is not None:
            stored.spilled.append((stored.bits - lower, parcel))
        return parcel is not None

    def whole(self, stored: Stored) -> tuple[Stored, PageSpace]:
        """An activation with all its planes, and the pages that it has: spilled ones are copies."""
        if not stored.spilled:
            return stored, self.space
        bits = stored.bits + sum(planes for planes, _ in stored.spilled)
        count, kept = stored.layout.pages(bits), len(stored.table)
        pages = torch.empty(count * PAGE_BYTES, dtype=torch.uint8, device=self.device)
        pages[: kept * PAGE_BYTES] = self.read_pages(stored.table).view(-1)
        end = kept * PAGE_BYTES
        for planes, parcel in reversed(stored.spilled):
            start, end = end, end + planes * stored.layout.plane_pages * PAGE_BYTES
            parcel.read(pages[start:end])
        whole = Stored(stored.layout, bits, stored.widths, stored.costs)
        whole.table.extend(range(count))
        size = 1 << max(count - 1, 0).bit_length()
        return whole, PageSpace(size, [pages], array("q", [pages.data_ptr()]))

    def read_pages(self, numbers: Sequence[int] | np.ndarray) -> torch.Tensor:
        """A copy of pages: ``uint8 [pages, PAGE_BYTES]``."""
        per, wanted = self.space.pages_per_segment, np.array(numbers, np.int64)
        out = torch.empty((len(wanted), PAGE_BYTES), dtype=torch.uint8, device=self.device)
        for index in np.unique(wanted // per):
            here = torch.from_numpy(np.flatnonzero(wanted // per == index)).to(self.device)
            rows = torch.from_numpy(wanted[wanted // per == index] % per).to(self.device)
            segment = self.space.segments[index]
            assert segment is not None
            out[here] = segment.view(-1, PAGE_BYTES)[rows]
        return out

    def _rank(self, stored: Stored) -> None:
        score = stored.demotion_score()
        if score < math.inf:
            self._serial += 1
            stored.rank = (score, self._serial, stored)
            self._order.add(stored.rank)

    def _give_back(self, stored: Stored, keep: int) -> None:
        pages = stored.table[keep:]
        del stored.table[keep:]
        self._free.extend(pages)
        self.used_pages -= len(pages)

    # Budget and segments -----------------------------------------------------------------------

    def set_limit(self, limit_bytes: float) -> bool:
        """Change the budget: demote, move pages together, give segments back.

        Returns:
            False when what is live is above the new budget even at its floor; the budget is then
            what is live, and the rest follows as activations are freed.
        """
        self.limit_bytes = limit_bytes
        self.limits_set += 1
        while self.held_bytes > limit_bytes and self.cheapest_demotion() < math.inf:
            self.demote_cheapest()
        within = self.held_bytes <= limit_bytes
        excess = self._footprint() - limit_bytes
        if excess > 0:
            self._release_segments(excess)
        return within

    def trim_if_idle(self) -> None:
        """Give empty segments back if a good part of what was taken has become free.

        While a backward pass goes on, what it has freed makes room for its gradients. Pinned ones
        stay for now: to give them back is to wait for the device.
        """
        freed = (len(self._free) - self._looked_at) * PAGE_BYTES
        if not self.pinned and freed > _IDLE_SHARE * self.reserved_bytes:
            self.trim()

    def trim(self) -> None:
        """Give back the segments in which nothing lives."""
        per = self.space.pages_per_segment
        sizes = self._segment_sizes()
        free_of = np.bincount(np.array(self._free, np.int64) // per, minlength=len(sizes))
        empty = np.flatnonzero((sizes == free_of) & (sizes > 0))
        if len(empty):
            self._before_change()
            self._withdraw_pages(empty)
            self._return_segments(empty)
        self._looked_at = len(self._free)

    @property
    def taken_bytes(self) -> int:
        """Bytes taken from the device, page tables and outside bytes included."""
        return self._footprint()

    def _footprint(self) -> int:
        return self.reserved_bytes + self.used_pages * TABLE_ENTRY_BYTES + self.outside_bytes

    def _grow_to(self, pages: int) -> bool:
        """Have ``pages`` free pages, taking segments as needed."""
        full = self.space.pages_per_segment
        while (missing := pages - len(self._free)) > 0:
            room = self.limit_bytes - self._footprint() - pages * TABLE_ENTRY_BYTES
            # Near the limit no more than is needed: exact bytes may want the rest.
            size = full if room >= 2 * full * PAGE_BYTES else min(missing, full)
            if size * PAGE_BYTES > room:
                return False
            self._add_segment(size)
        return True

    def _add_segment(self, size: int) -> None:
        segment = torch.empty(
            size * PAGE_BYTES, dtype=torch.uint8, device=self.device, pin_memory=self.pinned
        )
        if self.device.type == "cpu" and not self.pinned:
            advise_huge_pages(segment)
        space = self.space
        index = next((i for i, s in enumerate(space.segments) if s is None), len(space.segments))
        if index == len(space.segments):
            space.segments.append(None)
            space.pointers.append(0)
        space.segments[index] = segment
        space.pointers[index] = segment.data_ptr()
        self.reserved_bytes += segment.numel()
        first = index * space.pages_per_segment
        # Low numbers last: the free list is a stack, and a segment is then used from its start.
        self._free.extend(range(first + size - 1, first - 1, -1))

    def _segment_sizes(self) -> np.ndarray:
        return np.array(
            [0 if s is None else s.numel() // PAGE_BYTES for s in self.space.segments], np.int64
        )

    def _release_segments(self, excess: float) -> bool:
        """Give back at least ``excess`` bytes of segments, moving live pages together."""
        per = self.space.pages_per_segment
        sizes = self._segment_sizes()
        free = np.array(self._free, np.int32)
        free_of = np.bincount(free // per, minlength=len(sizes))
        live_of = sizes - free_of
        victims: list[int] = []
        released, to_move, room = 0, 0, len(free)
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
            self._drop_segments(np.array(victims))
        missing = excess - released * PAGE_BYTES
        return missing <= 0 or self._shrink_segments(missing)

    def _shrink_segments(self, excess: float) -> bool:
        """Give back ``excess`` bytes of free pages that share their segments with live ones.

        The live ones move to new segments of just their size, for a moment beyond the budget.
        """
        if len(self._free) * PAGE_BYTES < excess:
            return False
        sizes, per = self._segment_sizes(), self.space.pages_per_segment
        free_of = np.bincount(np.array(self._free, np.int64) // per, minlength=len(sizes))
        order = np.argsort(-free_of, kind="stable")
        enough = int(np.searchsorted(np.cumsum(free_of[order]) * PAGE_BYTES, excess)) + 1
        victims = order[:enough]
        live = int((sizes - free_of)[victims].sum())
        for start in range(0, live, per):
            self._add_segment(min(per, live - start))
        self._drop_segments(victims)
        return True

    def _drop_segments(self, victims: np.ndarray) -> None:
        """Move what lives in some segments to free pages of the others, and give them back."""
        self._before_change()
        per = self.space.pages_per_segment
        self._withdraw_pages(victims)
        moved = np.arange(len(self.space.segments) * per, dtype=np.int32)
        for stored in self._live:
            table = np.frombuffer(stored.table, np.int32)
            sources = table[np.isin(table // per, victims)]
            if not len(sources):
                continue
            targets = np.array(self._free[-len(sources) :], np.int32)
            del self._free[-len(sources) :]
            self._looked_at = min(self._looked_at, len(self._free))
            self._copy_pages(sources, targets)
            moved[sources] = targets
            np.copyto(np.frombuffer(stored.table, np.int32), moved[table])
        self._return_segments(victims)

    def _withdraw_pages(self, victims: np.ndarray) -> None:
        """Offer the free pages of some segments no longer."""
        free = np.array(self._free, np.int32)
        inside = np.isin(free // self.space.pages_per_segment, victims)
        self._free = array("i", free[~inside].tobytes())
        self._looked_at = min(self._looked_at, len(self._free))

    def _return_segments(self, victims: np.ndarray) -> None:
        """Give segments back to the device."""
        for index in victims:
            segment = self.space.segments[index]
            assert segment is not None
            self.reserved_bytes -= segment.numel()
            self.space.segments[index] = None
            self.space.pointers[index] = 0

    def _copy_pages(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy pages; neighbours that stay neighbours, as those of a plane mostly do, at once."""
        per, segments = self.space.pages_per_segment, self.space.segments
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

    def check(self) -> None:
        """Assert the invariants: every page is owned once, and what is counted is what is held.

        Linear in the number of pages; for tests.
        """
        owned = np.concatenate(
            [np.array(self._free, np.int32)]
            + [np.frombuffer(stored.table, np.int32).copy() for stored in self._live]
        )
        per = self.space.pages_per_segment
        expected = np.concatenate(
            [np.arange(size) + index * per for index, size in enumerate(self._segment_sizes())]
            or [np.zeros(0, np.int64)]
        )
        assert np.array_equal(np.sort(owned), expected), "a page is lost or owned twice"
        assert self.used_pages == sum(len(stored.table) for stored in self._live)
        for stored in self._live:
            assert len(stored.table) == stored.layout.pages(stored.bits)
        self._rank_all()
        ranked = {entry[2] for entry in self._order}
        assert ranked == {s for s in self._live if s.demotion_score() < math.inf}
        assert self.stored_bits == sum(s.layout.numel * s.bits for s in self._live)
