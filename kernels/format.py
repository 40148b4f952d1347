"""The storage format that every backend reads and writes.

A tensor of ``n`` elements is taken flat and padded to groups of 256. Each element has a code of
``bits`` bits; bit ``k`` of every code (``k = 0`` is the most significant) makes up bit plane
``k``. In its group's 32 bytes of a plane, element ``e`` owns bit ``e // 32`` of byte ``e % 32``.
A plane is cut into pages of ``PAGE_BYTES``; a page table names the pages, so that they need not
be adjacent.

Quantizers are *embedded*: the code of ``b`` bits is the top ``b`` bits of the 8-bit code. An
element is restored as ``a + s * table[bits][code]``, where ``(a, s)`` are the statistics that
its granularity unit shares.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum

import torch

GROUP = 256
"""Elements that share 32 bytes of each plane; also the unit of the ``GROUP`` granularity."""

LANES = 32
"""Bytes of a group in one plane, and the number of lanes in every ordered reduction."""

PAGE_BYTES = 1024
"""Bytes of a page: 32 groups (8192 elements) of one plane."""

GROUPS_PER_PAGE = PAGE_BYTES // LANES
MAX_BITS = 8

SMALLEST_SCALE = 1e-30
"""A unit whose scale is below this counts as constant: its codes are all zero."""

CHANNEL_BLOCK_ROWS = 64
"""Rows that are summed in sequence before the blocks of a column are."""

CHANNEL_BLOCKS_MAX = 64


class Granularity(IntEnum):
    """What shares one pair of statistics."""

    GROUP = 0
    TOKEN = 1
    CHANNEL = 2
    TENSOR = 3


class Statistics(IntEnum):
    """What the pair ``(a, s)`` of a unit is."""

    NONE = 0
    """Nothing is stored: a = 0, s = 1."""
    RANGE = 1
    """a = minimum, s = maximum - a."""
    MOMENTS = 2
    """a = mean, s = standard deviation."""
    PAIR = 3
    """The two values of a two-valued tensor; always fp32; one unit, the whole tensor."""


@dataclass(frozen=True, eq=False)
class Codebook:
    """How normalised values map to codes, and codes back.

    With statistics ``(a, s)`` the encoder finds an element's cell on a uniform grid,
    ``cell = clamp(trunc((x - (a + s * grid_origin)) * (grid_density / s)), 0, cells - 1)``, and
    its 8-bit code ``lut[cell]`` (``cell`` itself where there is no ``lut``). All of it is in
    fp32, in this order, without fused multiply-add, so that all backends agree bit for bit.

    Attributes:
        name: the codebook's name.
        statistics: what ``(a, s)`` are.
        grid_origin: where the grid starts, in units of ``s`` from ``a``.
        grid_density: cells per unit of ``s``.
        cells: number of cells, at most 16384.
        lut: ``uint8 [cells]``, the 8-bit code of each cell, or None for the identity (then
            ``cells`` is 256).
        tables: for each width 0..8 the ``float32 [2**bits]`` values of the codes.
    """

    name: str
    statistics: Statistics
    grid_origin: float
    grid_density: float
    cells: int
    lut: torch.Tensor | None = field(repr=False)
    tables: tuple[torch.Tensor, ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the parts of one encoded tensor stand in its page table.

    The table lists the pages of the statistics, then those of plane 0, plane 1, and so on, so
    that dropping the least significant plane drops the table's last ``plane_pages`` entries.

    Attributes:
        numel: elements ``n``.
        cols: length of the innermost dimension: a token's elements, the number of channels.
        granularity, codebook: the codec.
        wide: statistics are stored as fp32 rather than bf16.
    """

    numel: int
    cols: int
    granularity: Granularity
    codebook: Codebook
    wide: bool
    rows: int = field(init=False)
    groups: int = field(init=False)
    plane_pages: int = field(init=False)
    units: int = field(init=False)
    statistics_pages: int = field(init=False)

    def __post_init__(self) -> None:
        groups = -(-self.numel // GROUP)
        rows = self.numel // self.cols if self.cols else 0
        kind = self.codebook.statistics
        if kind is Statistics.NONE:
            units = 0
        elif kind is Statistics.PAIR or self.granularity is Granularity.TENSOR:
            units = 1
        elif self.granularity is Granularity.GROUP:
            units = groups
        else:
            units = rows if self.granularity is Granularity.TOKEN else self.cols
        put = object.__setattr__
        put(self, "rows", rows)
        put(self, "groups", groups)
        put(self, "plane_pages", -(-groups // GROUPS_PER_PAGE))
        put(self, "units", units)
        put(self, "statistics_pages", -(-units * (8 if self.wide else 4) // PAGE_BYTES))

    def pages(self, bits: int) -> int:
        """Number of pages at ``bits`` bits, statistics included."""
        return self.statistics_pages + bits * self.plane_pages


@dataclass
class PageSpace:
    """The memory that page numbers point into.

    Page ``p`` is the ``PAGE_BYTES`` bytes at ``(p % pages_per_segment) * PAGE_BYTES`` of segment
    ``p // pages_per_segment``.

    Attributes:
        pages_per_segment: pages of a full segment; a power of two.
        segments: ``uint8`` tensors (the last may be shorter), or None where one was given back.
        pointers: ``array('q')`` of their addresses, 0 for None.
    """

    pages_per_segment: int
    segments: list[torch.Tensor | None] = field(default_factory=list)
    pointers: array = field(default_factory=lambda: array("q"))


def wide_statistics(granularity: Granularity, bits: int) -> bool:
    """Whether statistics are fp32: always where they are few, and above 4 bits."""
    return bits > 4 or granularity in (Granularity.CHANNEL, Granularity.TENSOR)
