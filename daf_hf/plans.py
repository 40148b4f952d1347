"""Plans, and what they choose from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .allocation import Option
from .sites import Batch, SaveSite


@dataclass
class Plan:
    """What each site does in one forward pass.

    Attributes:
        batch: the size it was made for.
        options: one a site that has a choice.
        nbytes: what it expects to hold.
        error: predicted relative error of the gradient; NaN when nothing was measured.
        binary_elements: those of two-valued tensors, which take a bit each.
        least_bytes: what the smallest plan for the batch takes.
        least_seconds: where it does not keep to the time budget, what a plan of these bytes takes
            at the least; else None.
        limit_bytes: what it was made for.
        forgone_bytes: that what no calibration measures is to do without.
    """

    batch: Batch
    options: dict[SaveSite, Option]
    nbytes: int
    error: float
    binary_elements: int = 0
    least_bytes: int = 0
    least_seconds: float | None = None
    limit_bytes: float = math.inf
    forgone_bytes: int = 0

    @property
    def mean_bits(self) -> float:
        """Mean width of the elements that it encodes (NaN when there are none)."""
        sizes = [(self.binary_elements, 1)] + [
            (elements_of(site, self.batch), option.bits)
            for site, option in self.options.items()
            if option.bits is not None
        ]
        elements = sum(numel for numel, _ in sizes)
        return sum(numel * bits for numel, bits in sizes) / elements if elements else math.nan


@dataclass(frozen=True)
class Choices:
    """What there is to choose from for one batch size.

    Attributes:
        batch: that size.
        fixed_bytes: of what has no choice.
        binary_elements: of these, those that take a bit each.
        options: the options of each site that has one; storing exactly is among them.
        unmeasured: of what no calibration measures, all together; in the most bits last.
    """

    batch: Batch
    fixed_bytes: int
    binary_elements: int
    options: dict[SaveSite, list[Option]]
    unmeasured: tuple[Option, ...] = ()

    @property
    def least_bytes(self) -> int:
        """With every site at its smallest."""
        return self.fixed_bytes + sum(min(o.nbytes for o in c) for c in self.sites())

    @property
    def exact_bytes(self) -> int:
        """With every site stored exactly."""
        exact = (o.nbytes for c in self.options.values() for o in c if o.codec is None)
        return self.fixed_bytes + sum(exact) + self.unmeasured_bytes

    @property
    def unmeasured_bytes(self) -> int:
        """Of what no calibration measures, in the most bits."""
        return self.unmeasured[-1].nbytes if self.unmeasured else 0

    def sites(self) -> list[Sequence[Option]]:
        """What allocators choose from; what no calibration measures comes last."""
        return [*self.options.values(), *([self.unmeasured] if self.unmeasured else [])]


def elements_of(site: SaveSite, batch: Batch) -> int:
    """Elements that a site stores in one forward pass of the batch."""
    assert site.probed is not None
    return site.probed.predict(batch)[0] * site.probed.uses
