"""Tensors that are held exactly because there was room, and give way when there is none."""

from __future__ import annotations

import heapq
import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .arena import PAGE_COST
from .candidates import UNPLANNED_COSTS
from .codecs import Codec
from .physical import Yielding
from .sites import SaveSite
from .stored import Stored
from .tensors import is_encodable

if TYPE_CHECKING:
    from .placement import Placement


@dataclass(frozen=True)
class Way:
    """How elements would be encoded that are, or would be, held exactly.

    Attributes:
        stored: for the arena; not inserted.
        codec: with which it is.
        freed: bytes that are held no longer; the pages of ``stored`` are yet to be taken off.
    """

    stored: Stored
    codec: Codec
    freed: int

    @property
    def saved_bytes(self) -> int:
        """What it makes free."""
        return self.freed - self.stored.layout.pages(self.stored.bits) * PAGE_COST

    @property
    def score(self) -> float:
        """Cost per page that it makes free, as :meth:`Stored.demotion_score`; inf where none."""
        pages = self.saved_bytes / PAGE_COST
        return self.stored.costs[self.stored.bits] / pages if pages >= 1 else math.inf


class GivingWay:
    """The order in which what is held exactly gives way: least cost a page first.

    Nothing is ranked before there is a need: most steps have none. The caller holds the
    placement's lock.

    Args:
        placement: holds the elements.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._unranked: list[weakref.ref[Yielding]] = []
        self._order: list[tuple[float, int, weakref.ref[Yielding]]] = []
        self._serial = 0

    def add(self, held: Yielding) -> None:
        """From now on it may have to give way."""
        self._unranked.append(weakref.ref(held))

    def cheapest(self) -> float:
        """Cost per page of the one that gives way next (inf: there is none)."""
        unranked, self._unranked = self._unranked, []
        for reference in unranked:
            held = reference()
            if held is None:
                continue
            freed = self._freed(held)
            if not freed:  # others hold the same memory; they may end before it does
                self._unranked.append(reference)
                continue
            way = self.way(held.elements, held.cols, held.site, freed)
            if way is not None:
                self._serial += 1
                heapq.heappush(self._order, (way.score, self._serial, reference))
        while self._order and self._order[0][2]() is None:
            heapq.heappop(self._order)
        return self._order[0][0] if self._order else math.inf

    def pop(self) -> tuple[Yielding, Way] | None:
        """The one that gives way next, which is then no longer among them; None without one."""
        while not math.isinf(self.cheapest()):
            reference = heapq.heappop(self._order)[2]
            held = reference()
            freed = self._freed(held) if held is not None else 0
            if held is not None and freed:
                way = self.way(held.elements, held.cols, held.site, freed)
                if way is not None:
                    return held, way
            elif held is not None:
                self._unranked.append(reference)
        return None

    def clear(self) -> None:
        """Forget those that have ended."""
        self._unranked = [each for each in self._unranked if each() is not None]
        self._order = [entry for entry in self._order if entry[2]() is not None]
        heapq.heapify(self._order)

    def way(self, flat: Tensor, cols: int, site: SaveSite, freed: int) -> Way | None:
        """How elements would be encoded that take ``freed`` bytes exactly.

        None where they cannot be, or that makes no room.
        """
        placement = self._placement
        if not placement.may_lose_bits(flat, site) or not is_encodable(flat):
            return None
        widths = placement.widths(site)
        codecs = [codec for codec in site.distortions if not codec.private]
        if site.importance is not None and codecs:

            def penalty(codec: Codec) -> float:
                """Distortion; what statistics take would have been so many bits an element."""
                layout = codec.layout(flat.numel(), cols, widths[-1])
                bits = layout.statistics_pages * PAGE_COST * 8 / flat.numel()
                return site.distortions[codec][widths[-1]] * 4.0**bits

            codec = min(codecs, key=penalty)
            costs = site.costs(codec)
        else:
            codec, costs = placement.unplanned_codec(flat), UNPLANNED_COSTS
        for bits in reversed(widths):  # few bits alone make room at the expense of a small tensor
            layout = codec.layout(flat.numel(), cols, bits)
            way = Way(Stored(layout, bits, widths, costs), codec, freed)
            if not math.isinf(way.score):
                return way
        return None

    def _freed(self, held: Yielding) -> int:
        if held.cdata is None:
            return held.elements.nbytes
        return self._placement.ledger.sole_bytes(held.cdata)
