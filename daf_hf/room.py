"""Room under the budget, found where it costs least: from what is live, or from itself."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

from .arena import PAGE_COST, Arena
from .giving_way import GivingWay, Way
from .physical import Physical, Yielding
from .stored import Stored


class Room:
    """Finds room for pages and for exact bytes.

    The caller holds the placement's lock.

    Args:
        arena: under the budget.
        giving_way: what is held exactly, and need not be.
        settle: ends what has ended; False when nothing had.
        give_way: encodes one that is held exactly.

    Attributes:
        forgone_bytes: that what was stored has done without, of what it was to get; planes that
            were dropped later are the arena's to count.
    """

    def __init__(
        self,
        arena: Arena,
        giving_way: GivingWay,
        settle: Callable[[], bool],
        give_way: Callable[[Yielding, Way], None],
    ) -> None:
        self._arena, self._giving_way = arena, giving_way
        self._settle, self._give_way = settle, give_way
        self._witnessed: weakref.WeakSet[Physical] = weakref.WeakSet()
        self.forgone_bytes = 0

    @property
    def lost_bytes(self) -> int:
        """What tensors have lost, or done without, for want of room, so far."""
        return self._arena.demoted_pages * PAGE_COST + self.forgone_bytes

    def fits(self, nbytes: int) -> bool:
        """Whether so many exact bytes have room at nobody's expense."""
        fits = self._arena.fits
        return fits(0, nbytes) or (self._settle() and fits(0, nbytes))

    def insert(self, stored: Stored) -> bool:
        """Insert ``stored``, demoting whatever costs least per page: what is live, or itself."""
        arena = self._arena
        while not arena.insert(stored):
            if self._settle():
                continue
            own, live = stored.demotion_score(), self._cheapest()
            if own <= live and (arena.spill is None or math.isinf(live)):
                lower = stored.lower()
                if lower is not None:
                    pages = (stored.bits - lower) * stored.layout.plane_pages
                    self.forgone_bytes += pages * PAGE_COST
                    stored.bits = lower
                elif not self._drop_witnesses():
                    return False
            else:
                self._demote_cheapest()
        return True

    def reserve(self, nbytes: int, score: float = math.inf) -> bool:
        """Count exact bytes, demoting what is live as long as that costs less a page."""
        while not self._arena.reserve_outside(nbytes):
            if self._settle():
                continue
            if (cheapest := self._cheapest()) < score:
                self._demote_cheapest()
            elif not math.isinf(cheapest) or not self._drop_witnesses():
                return False
        return True

    def set_limit(self, limit_bytes: float) -> bool:
        """Change the budget; False when what is live stays above it for now."""
        self._settle()
        while self._arena.held_bytes > limit_bytes:
            if not math.isinf(self._cheapest()):
                self._demote_cheapest()
            elif not self._drop_witnesses():
                break
        return self._arena.set_limit(limit_bytes)

    def note_witnesses(self, physical: Physical) -> None:
        """Its witnesses may be dropped where there is no other room."""
        self._witnessed.add(physical)

    def _cheapest(self) -> float:
        """Cost per page of making room at the expense of what is live (inf: there is no way)."""
        return min(self._arena.cheapest_demotion(), self._giving_way.cheapest())

    def _demote_cheapest(self) -> None:
        """Drop planes, or encode what is held exactly."""
        if self._arena.cheapest_demotion() <= self._giving_way.cheapest():
            return self._arena.demote_cheapest()
        found = self._giving_way.pop()
        if found is not None:
            self._give_way(*found)

    def _drop_witnesses(self) -> bool:
        """Make room at the expense of all witnesses; False where there are none."""
        dropped = bool(self._witnessed)
        for physical in list(self._witnessed):
            physical.witnesses = physical.witness_lease = None
        self._witnessed.clear()
        self._settle()
        return dropped
