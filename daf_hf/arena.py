"""The paged arena: the budget, and the order of demotion.

The budget caps everything that is held for the backward pass: pages, page tables, and the exact
bytes that others hold (:meth:`Arena.reserve_outside`). Segments are taken from the device as they
are needed and given back when the budget shrinks or exact bytes need the room.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

import torch
from sortedcontainers import SortedList

from .kernels.format import PAGE_BYTES, PageSpace
from .segments import Segments, segment_pages
from .spill import Parcel
from .stored import Stored

TABLE_ENTRY_BYTES = 4
PAGE_COST = PAGE_BYTES + TABLE_ENTRY_BYTES
"""Bytes that one page takes out of the budget: itself and its entry in a page table."""


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
        space: where the pages lie, for kernels.
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
        pages = segment_pages(limit_bytes)
        self._segments = Segments(pages, self.device, before_change, pinned)
        self.space = self._segments.space
        self.outside_bytes = 0
        self.used_pages = 0
        self.demotions = 0
        self.demoted_pages = 0
        self.limits_set = 0
        self.stored_elements = 0
        self.stored_bits = 0
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
    def reserved_bytes(self) -> int:
        """Bytes of the segments, which are taken from the device."""
        return self._segments.nbytes

    @property
    def taken_bytes(self) -> int:
        """Bytes taken from the device, page tables and outside bytes included."""
        return self.reserved_bytes + self.used_pages * TABLE_ENTRY_BYTES + self.outside_bytes

    @property
    def room_bytes(self) -> float:
        """Bytes that may be held more with all segments staying where they are."""
        return self.limit_bytes - self.taken_bytes

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
            stored.table = self._segments.take(pages)
            self.used_pages += pages
        stored.spills = self.spill is not None
        self._live.add(stored)
        self._unranked[stored] = None
        self.stored_elements += stored.layout.numel
        self.stored_bits += stored.layout.numel * stored.bits
        return True

    def exchange(self, stored: Stored, nbytes: int) -> bool:
        """Insert ``stored`` in exchange for outside bytes that are about to be released.

        Until they are, more than the budget may be held.
        """
        limit = self.limit_bytes
        self.limit_bytes = max(limit, self.taken_bytes)
        self.outside_bytes -= nbytes
        try:
            return self.insert(stored)
        finally:
            self.outside_bytes += nbytes
            self.limit_bytes = limit

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
        if nbytes and not self.fits(0, nbytes):
            return False
        excess = self.taken_bytes + nbytes - self.limit_bytes
        if nbytes and excess > 0 and not self._release(excess):
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
        score, _, stored = self._order[0]
        lower = stored.lower()
        assert lower is not None, score
        spilled = not stored.spills or self._spill_planes(stored, lower)
        self._order.pop(0)
        stored.rank = None
        if not spilled:
            stored.spills = False
            return self._rank(stored)  # to be dropped at its turn, as far as it may be
        if not stored.spills:
            stored.spilled.clear()  # without those above them they say nothing
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
        pages = self._segments.read(stored.table[stored.layout.pages(lower) :])
        parcel = self.spill(pages.view(-1))
        if parcel is not None:
            stored.spilled.append((stored.bits - lower, parcel))
        return parcel is not None

    def whole(self, stored: Stored) -> tuple[Stored, PageSpace]:
        """An activation with all its planes, and the pages that it has: spilled ones are copies."""
        if not stored.spilled:
            return stored, self.space
        bits = stored.whole_bits
        count, kept = stored.layout.pages(bits), len(stored.table)
        pages = torch.empty(count * PAGE_BYTES, dtype=torch.uint8, device=self.device)
        pages[: kept * PAGE_BYTES] = self._segments.read(stored.table).view(-1)
        end = kept * PAGE_BYTES
        for planes, parcel in reversed(stored.spilled):
            start, end = end, end + planes * stored.layout.plane_pages * PAGE_BYTES
            parcel.read(pages[start:end])
        whole = Stored(stored.layout, bits, stored.widths, stored.costs)
        whole.table.extend(range(count))
        size = 1 << max(count - 1, 0).bit_length()
        return whole, PageSpace(size, [pages], array("q", [pages.data_ptr()]))

    def _rank(self, stored: Stored) -> None:
        score = stored.demotion_score()
        if score < math.inf:
            self._serial += 1
            stored.rank = (score, self._serial, stored)
            self._order.add(stored.rank)

    def _give_back(self, stored: Stored, keep: int) -> None:
        pages = stored.table[keep:]
        del stored.table[keep:]
        self._segments.give_back(pages)
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
        excess = self.taken_bytes - max(limit_bytes, self.held_bytes)
        if excess > 0:
            self._release(excess)
        return within

    def trim_if_idle(self) -> None:
        """See :meth:`daf_hf.segments.Segments.trim_if_idle`."""
        self._segments.trim_if_idle()

    def trim(self) -> None:
        """Give back the segments in which nothing lives."""
        self._segments.trim()

    def _grow_to(self, pages: int) -> bool:
        """Have ``pages`` free pages, taking segments as needed."""
        full = self.space.pages_per_segment
        while (missing := pages - self._segments.free_pages) > 0:
            room = self.limit_bytes - self.taken_bytes - pages * TABLE_ENTRY_BYTES
            # Near the limit no more than is needed: exact bytes may want the rest.
            size = full if room >= 2 * full * PAGE_BYTES else min(missing, full)
            if size * PAGE_BYTES > room:
                return False
            self._segments.add(size)
        return True

    def _release(self, excess: float) -> bool:
        """Give back at least ``excess`` bytes of segments, moving live pages together."""
        return self._segments.release(excess, [stored.table for stored in self._live])

    def check(self) -> None:
        """Assert the invariants: every page is owned once, and what is counted is what is held.

        Linear in the number of pages; for tests.
        """
        self._segments.check([stored.table for stored in self._live])
        assert self.used_pages == sum(len(stored.table) for stored in self._live)
        for stored in self._live:
            assert len(stored.table) == stored.layout.pages(stored.bits)
        self._rank_all()
        ranked = {entry[2] for entry in self._order}
        assert ranked == {s for s in self._live if s.demotion_score() < math.inf}
        assert self.stored_bits == sum(s.layout.numel * s.bits for s in self._live)
