"""Rows that a normalisation reads, restored with their own mean and size.

A normalisation's backward pass takes out of a gradient what points along the row: of ``g`` it
leaves ``g - x (x g) / |x|^2``, a projection. With a row ``x'`` in place of ``x`` beside statistics
of ``x`` that is none any more: where ``x'`` is larger than ``x`` it enlarges a gradient, and does
so in each layer that the gradient passes, most of all in rows of which few elements are massive
(Sun et al. 2024, arXiv 2402.17762). Rows of the right mean and size make it a projection again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .leases import Lease
from .physical import Physical
from .sites import SaveSite

SMALLEST_SIZE = 1e-12
"""Standard deviation of a restored row below which it has no direction that could be scaled."""
BLOCK_ELEMENTS = 1 << 17
"""Rows are measured so many elements at a time."""


class RowStatistics(NamedTuple):
    """Means of rows, and standard deviations: ``float32 [rows, 1]`` each."""

    mean: Tensor
    deviation: Tensor

    @property
    def nbytes(self) -> int:
        return self.mean.nbytes + self.deviation.nbytes

    @staticmethod
    def of(flat: Tensor, cols: int) -> RowStatistics:
        """Those of the rows of ``cols`` elements of a flat tensor.

        In two passes: ``torch.var_mean`` goes element by element on a CPU, which takes ten times
        as long.
        """
        rows = flat.view(-1, cols)
        mean = rows.mean(1, keepdim=True, dtype=torch.float32)
        deviation = torch.empty_like(mean)
        for centred, block, own_mean, size in _blocks(rows, mean, deviation):
            torch.sub(block, own_mean, out=centred)
            torch.linalg.vector_norm(centred, dim=1, keepdim=True, out=size)
        return RowStatistics(mean, deviation.mul_(cols**-0.5))

    def match(self, restored: Tensor) -> Tensor:
        """Give flat rows, in memory that may be changed, these statistics."""
        rows = restored.view(len(self.mean), -1)
        mean, deviation = RowStatistics.of(restored, rows.shape[1])
        sizes = self.deviation + deviation  # of rows too large to be squared they are not finite
        matched = (deviation > SMALLEST_SIZE) & sizes.isfinite()
        scale = torch.where(matched, self.deviation / deviation, 1.0)
        shift = torch.where(sizes.isfinite(), self.mean - mean * scale, 0.0)
        if rows.dtype is torch.float32:
            torch.addcmul(shift, rows, scale, out=rows)
            return restored
        for wide, block, by, plus in _blocks(rows, scale, shift):
            block.copy_(torch.mul(block, by, out=wide).add_(plus))
        return restored


class _Scratch(threading.local):
    """Memory that a thread keeps: blocks that come and go would leave holes in malloc's heap."""

    def __init__(self) -> None:
        self._kept: dict[torch.device, Tensor] = {}

    def like(self, block: Tensor) -> Tensor:
        """``float32`` of a block's shape."""
        kept = self._kept.get(block.device)
        if kept is None or kept.numel() < block.numel():
            size = max(block.numel(), BLOCK_ELEMENTS)
            kept = torch.empty(size, dtype=torch.float32, device=block.device)
            self._kept[block.device] = kept
        return kept[: block.numel()].view(block.shape)


_SCRATCH = _Scratch()


def _blocks(rows: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks that stay in a core's cache: scratch memory, rows, and what belongs to them."""
    size = max(BLOCK_ELEMENTS // max(rows.shape[1], 1), 1)
    for block, *parts in zip(*(each.split(size) for each in (rows, *columns)), strict=True):
        yield _SCRATCH.like(block), block, *parts


def statistics_bytes(numel: int, cols: int) -> int:
    """Bytes of the :class:`RowStatistics` of so many elements."""
    return 2 * 4 * (numel // cols)


class Matched(Physical):
    """Rows that are restored with their own statistics.

    Args:
        site: the save site.
        rows: as they are stored.
        statistics: of the rows as they were.
        lease: of their bytes.
    """

    __slots__ = ("rows", "statistics")

    def __init__(
        self, site: SaveSite, rows: Physical, statistics: RowStatistics, lease: Lease
    ) -> None:
        super().__init__(site, lease, rows.private)
        self.rows, self.statistics = rows, statistics

    def flat(self) -> Tensor:
        return self.statistics.match(self.rows.own())
