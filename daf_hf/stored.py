"""What the arena stores of one activation, and how far it may be demoted."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Sequence

from .kernels.format import GROUP, GROUPS_PER_PAGE, Granularity, Layout
from .spill import Parcel

PAGE_ELEMENTS = GROUPS_PER_PAGE * GROUP
"""Elements of which one page holds a plane."""

PART_PAGES = 128
"""Pages of a plane that are read at a time, where parts of a tensor will do."""

_PART = PART_PAGES * PAGE_ELEMENTS


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

    @property
    def whole_bits(self) -> int:
        """Planes that there are, with those that are spilled."""
        return self.bits + sum(planes for planes, _ in self.spilled)

    def lower(self) -> int | None:
        """The next lower width, None at the floor (without planes, where these are spilled)."""
        below = [width for width in self.widths if width < self.bits]
        if not below and self.spills and self.bits and self.costs:
            below = [0]
        return below[-1] if below and self.layout.plane_pages else None

    def demotion_score(self) -> float:
        """Cost per page freed of demoting it by one width (inf at the floor).

        Planes that are dropped take those with them that were spilled before.
        """
        lower = self.lower()
        if lower is None:
            return math.inf
        pages = (self.bits - lower) * self.layout.plane_pages
        now = self.bits if self.spills else self.whole_bits
        return (self.costs[lower] - self.costs[now]) / pages
