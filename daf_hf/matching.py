"""Rows that a normalisation reads, restored with their own mean and size.

A normalisation's backward pass takes out of a gradient what points along the row: of ``g`` it
leaves ``g - x (x g) / |x|^2``, a projection. With a row ``x'`` in place of ``x`` beside statistics
of ``x`` that is none any more: where ``x'`` is larger than ``x`` it enlarges a gradient, and does
so in each layer that the gradient passes, most of all in rows of which few elements are massive
(Sun et al. 2024, arXiv 2402.17762). Rows of the right mean and size make it a projection again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .leases import Lease
from .physical import Physical
from .sites import SaveSite

SMALLEST_SIZE = 1e-12
"""Standard deviation of a restored row below which it has no direction that could be scaled."""
BLOCK_ELEMENTS = 1 << 18
"""Rows are measured, and scaled, so many elements at a time."""


class RowStatistics(NamedTuple):
    """Means of rows, and standard deviations: ``float32 [rows, 1]`` each."""

    mean: Tensor
    deviation: Tensor

    @property
    def nbytes(self) -> int:
        return self.mean.nbytes + self.deviation.nbytes

    @staticmethod
    def of(flat: Tensor, cols: int) -> RowStatistics:
        """Those of the rows of ``cols`` elements of a flat tensor."""
        rows = flat.view(-1, cols)
        measured = [_measured(block.float()) for block in rows.split(_block_rows(rows))]
        return RowStatistics(*map(torch.cat, zip(*measured, strict=True)))

    def match(self, restored: Tensor) -> Tensor:
        """Give flat rows, in memory that may be changed, these statistics."""
        rows = restored.view(len(self.mean), -1)
        size = _block_rows(rows)
        for block, own_mean, own_deviation in zip(
            *(each.split(size) for each in (rows, *self)), strict=True
        ):
            wide = block.float()
            mean, deviation = _measured(wide)
            sizes = own_deviation + deviation  # not finite where rows are too large to be squared
            matched = (deviation > SMALLEST_SIZE) & sizes.isfinite()
            scale = torch.where(matched, own_deviation / deviation, 1.0)
            shift = torch.where(sizes.isfinite(), own_mean - mean * scale, 0.0)
            torch.addcmul(shift, wide, scale, out=wide)
            if wide.dtype is not block.dtype:
                block.copy_(wide)
        return restored


def _block_rows(rows: Tensor) -> int:
    """As many as stay in a core's cache from one pass over them to the next."""
    return max(BLOCK_ELEMENTS // max(rows.shape[1], 1), 1)


def _measured(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of ``float32`` rows.

    In two passes: ``torch.var_mean`` goes element by element on a CPU, which takes ten times as
    long.
    """
    mean = rows.mean(1, keepdim=True)
    size = torch.linalg.vector_norm(rows - mean, dim=1, keepdim=True)
    return mean, size.mul_(rows.shape[1] ** -0.5)


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
