"""Plans: every site's codec and width for the batch at hand."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from .allocation import Option, allocate, lower_hull
from .arena import PAGE_COST
from .codecs import BINARY
from .expressions import WITNESSES
from .kernels.noise import STATE_BYTES
from .placement import SMALLEST_BYTES
from .saved_tensors import Compressor
from .sites import Batch, SaveSite

_PLANS_KEPT = 256
_FORWARDS_MAX = 64
_EMPTY_SHARE = 0.05


@dataclass
class Plan:
    """What each site does in one forward pass.

    Attributes:
        batch: the size it was made for.
        options: one a site that has a choice.
        nbytes: what it expects to hold.
        error: predicted relative error of the gradient; NaN when nothing was measured.
    """

    batch: Batch
    options: dict[SaveSite, Option]
    nbytes: int
    error: float


class Planner:
    """Makes and remembers plans, one for each signature of the inputs.

    Args:
        compressor: whose sites are planned for.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self.least_bytes = 0
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._corrections: dict[Any, int] = {}
        self._forwards = 0
        self._overlap = 1

    def forget(self) -> None:
        """Drop the plans: importances, sites or the budget have changed."""
        self._plans.clear()

    def learn_candidates(self, batch: Batch) -> None:
        """After a calibration: keep the options that could ever be chosen."""
        for site in self.compressor.tracker.sites.values():
            site.candidates = []
            if site.probed is None or site.importance is None or not site.distortions:
                continue
            every = [
                option
                for codec in site.distortions
                for bits in self.compressor.config.bits
                for option in [self._option(site, batch, codec, bits)]
            ]
            best = [
                min((o for o in every if o.bits == bits), key=lambda o: (o.cost, o.nbytes))
                for bits in self.compressor.config.bits
            ]
            kept = {(o.codec, o.bits): None for o in [*lower_hull(every), *best]}
            site.candidates = [(c, b) for c, b in kept if c is not None and b is not None]
            # The codebooks of all others need not stay.
            site.distortions = {c: site.distortions[c] for c, _ in site.candidates}
            self.compressor.placement.calibrated = True
        self.forget()

    def plan(self, key: Any, batch: Batch) -> Plan:
        """The plan for inputs of this signature and size."""
        self._count_forward()
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make(key, batch)
            if len(self._plans) > _PLANS_KEPT:
                self._plans.popitem(last=False)
        return plan

    def apply(self, plan: Plan) -> None:
        """Tell the sites."""
        for site in self.compressor.tracker.sites.values():
            site.option = plan.options.get(site)

    def learn_from(self, key: Any, plan: Plan, wanted_bytes: int) -> None:
        """Correct for what a plan did not foresee, if it did matter."""
        missed = wanted_bytes - plan.nbytes
        limit = self.compressor.arena.limit_bytes
        if self._overlap == 1 and abs(missed) > 0.002 * limit:
            known = self._corrections.get(key, 0)
            self._corrections[key] = known + missed
            self._plans.pop(key, None)

    def _count_forward(self) -> None:
        """Several forward passes before one backward share the budget."""
        arena = self.compressor.arena
        if arena.held_bytes < _EMPTY_SHARE * arena.limit_bytes:
            self._forwards = 0
        self._forwards = min(self._forwards + 1, _FORWARDS_MAX)
        if self._forwards > self._overlap:
            self._overlap = self._forwards
            self.forget()

    def _make(self, key: Any, batch: Batch) -> Plan:
        fixed, choices = self._corrections.get(key, 0), {}
        for site in self.compressor.tracker.sites.values():
            if site.probed is None:
                continue
            if not site.candidates:
                fixed += self._fixed_bytes(site, batch)
                continue
            options = [self._option(site, batch, codec, bits) for codec, bits in site.candidates]
            choices[site] = [*options, self._exact(site, batch)]
        budget = self.compressor.arena.limit_bytes / self._overlap - fixed
        chosen = allocate(self.compressor.config.allocator, list(choices.values()), budget)
        self.least_bytes = fixed + sum(min(o.nbytes for o in c) for c in choices.values())
        options = dict(zip(choices, chosen, strict=True))
        return Plan(
            batch,
            options,
            fixed + sum(option.nbytes for option in chosen),
            math.sqrt(sum(option.cost for option in chosen)) if chosen else math.nan,
        )

    def _option(self, site: SaveSite, batch: Batch, codec: Any, bits: int) -> Option:
        assert site.probed is not None and site.importance is not None
        numel, cols = site.probed.predict(batch)
        cols = cols if cols and numel % cols == 0 else 1
        pages = codec.layout(numel, cols, bits).pages(bits)
        costs = [site.importance * d for d in site.distortions[codec]]
        costs[0] = max(costs[0], site.error_at_zero or 0.0)
        nbytes = pages * PAGE_COST * site.probed.uses + _witness_bytes(site)
        return Option(nbytes, costs[bits], codec, bits, tuple(costs), site.importance)

    def _exact(self, site: SaveSite, batch: Batch) -> Option:
        assert site.probed is not None and site.importance is not None
        numel, _ = site.probed.predict(batch)
        nbytes = numel * site.dtype.itemsize * site.probed.uses + _witness_bytes(site)
        return Option(nbytes, 0.0, None, None, importance=site.importance)

    def _fixed_bytes(self, site: SaveSite, batch: Batch) -> int:
        assert site.probed is not None
        numel, cols = site.probed.predict(batch)
        nbytes = numel * site.dtype.itemsize
        if site.derived and nbytes >= SMALLEST_BYTES:
            return _witness_bytes(site)
        if site.two_valued and nbytes >= SMALLEST_BYTES:
            nbytes = BINARY.layout(numel, cols or 1, 1).pages(1) * PAGE_COST
            if site.keep is not None:
                nbytes = min(nbytes, STATE_BYTES)
        return nbytes * site.probed.uses + _witness_bytes(site)


def _witness_bytes(site: SaveSite) -> int:
    """What is noted of a tensor from which others follow."""
    if not site.feeds or site.probed is None:
        return 0
    return WITNESSES * site.dtype.itemsize * site.probed.uses
