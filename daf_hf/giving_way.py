"""Tensors that are held exactly because there was room, and give way when there is none."""

from __future__ import annotations

import heapq
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from .arena import PAGE_COST
from .codecs import Codec
from .physical import Yielding
from .stored import Stored


@dataclass(frozen=True)
class Way:
    """How one of them can be encoded.

    Attributes:
        stored: for the arena; not inserted.
        codec: with which it is.
        freed: bytes that are held no longer; the pages of ``stored`` are yet to be taken off.
    """

    stored: Stored
    codec: Codec
    freed: int

    @property
    def score(self) -> float:
        """Cost per page that it makes free, as :meth:`Stored.demotion_score`; inf where none."""
        layout, bits = self.stored.layout, self.stored.bits
        pages = self.freed / PAGE_COST - layout.pages(bits)
        return self.stored.costs[bits] / pages if pages >= 1 else math.inf


class GivingWay:
    """The order in which what is held exactly gives way: least cost a page first.

    Nothing is ranked before there is a need: most steps have none. The caller holds the
    placement's lock.

    Args:
        way: of one of them; None where that cannot be, or makes no room.
    """

    def __init__(self, way: Callable[[Yielding], Way | None]) -> None:
        self._way = way
        self._new: list[weakref.ref[Yielding]] = []
        self._order: list[tuple[float, int, weakref.ref[Yielding]]] = []
        self._serial = 0

    def add(self, held: Yielding) -> None:
        """From now on it may have to give way."""
        self._new.append(weakref.ref(held))

    def cheapest(self) -> float:
        """Cost per page of the one that gives way next (inf: there is none)."""
        for each in self._new:
            held = each()
            way = self._way(held) if held is not None else None
            if way is not None:
                self._serial += 1
                heapq.heappush(self._order, (way.score, self._serial, each))
        self._new.clear()
        while self._order and self._order[0][2]() is None:
            heapq.heappop(self._order)
        return self._order[0][0] if self._order else math.inf

    def pop(self) -> tuple[Yielding, Way] | None:
        """The one that gives way next, which is then no longer among them; None without one."""
        while not math.isinf(self.cheapest()):
            held = heapq.heappop(self._order)[2]()
            way = self._way(held) if held is not None else None  # anew: others may have ended
            if held is not None and way is not None:
                return held, way
        return None

    def clear(self) -> None:
        """Forget those that have ended."""
        self._new = [each for each in self._new if each() is not None]
        self._order = [entry for entry in self._order if entry[2]() is not None]
        heapq.heapify(self._order)
