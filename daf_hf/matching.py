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


class RowStatistics(NamedTuple):
    """Means of rows, and standard deviations: ``float32 [rows, 1]`` each."""

    mean: Tensor
    deviation: Tensor

    @staticmethod
    def of(flat: Tensor, cols: int) -> RowStatistics:
        """Those of the rows of ``cols`` elements of a flat tensor."""
        variance, mean = torch.var_mean(flat.view(-1, cols).float(), 1, correction=0, keepdim=True)
        return RowStatistics(mean, variance.sqrt_())

    def match(self, restored: Tensor) -> Tensor:
        """Give flat rows, in memory that may be changed, these statistics."""
        rows = restored.view(len(self.mean), -1)
        mean, deviation = RowStatistics.of(restored, rows.shape[1])
        sizes = self.deviation + deviation  # of rows too large to be squared they are not finite
        matched = (deviation > SMALLEST_SIZE) & sizes.isfinite()
        scale = torch.where(matched, self.deviation / deviation, 1.0)
        shift = torch.where(sizes.isfinite(), self.mean - mean * scale, 0.0)
        wide = rows.float()
        torch.addcmul(shift, wide, scale, out=wide)
        return wide.to(rows.dtype).view(-1)


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
