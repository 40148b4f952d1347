"""Making plans: every site's codec and width for the batch at hand."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import OrderedDict
from typing import Any

from .allocation import Option, lower_hull
from .arena import PAGE_COST
from .candidates import UNPLANNED_COSTS
from .codec_times import CodecTimes
from .codecs import BINARY
from .distributed import Ranks
from .dropout import SMALLEST_ELEMENTS
from .expressions import WITNESSES
from .kernels.noise import STATE_BYTES
from .matching import statistics_bytes
from .placement import COMPRESSIBLE, SMALLEST_BYTES
from .plans import Choices, Plan, elements_of
from .saved_tensors import Compressor
from .sites import Batch, SaveSite
from .time_price import allocate_in_time

logger = logging.getLogger("daf_hf")

_PLANS_KEPT = 256
_CHOICES_KEPT = 4
_FORWARDS_MAX = 64
_ROUNDS_KEPT = 8
_EMPTY_SHARE = 0.05


class Planner:
    """Makes and remembers plans, one for each signature of the inputs.

    Plans are remembered for the budget that they were made for, so a change of the budget needs no
    word to the planner, from whichever thread it comes.

    Args:
        compressor: whose sites are planned for.

    Attributes:
        least_bytes: under which no budget does for the last plan's batch; 0 while nothing is
            measured.
        token_seconds: plain training's time of a step, each token's share; None before it is known.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self.least_bytes = 0
        self.token_seconds: float | None = None
        self._times = CodecTimes(compressor.backend, compressor.device)
        self._warned = False
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._choices: OrderedDict[Any, Choices] = OrderedDict()
        self._corrections: OrderedDict[Any, int] = OrderedDict()
        self._forwards = 0
        self._rounds: list[int] = []
        self._base = 0.0

    def forget(self) -> None:
        """Drop the plans: importances or sites have changed."""
        self._plans.clear()
        self._choices.clear()

    def learn_candidates(self, batch: Batch) -> None:
        """After a calibration: keep the options that could ever be chosen."""
        if not self.compressor.placement.calibrated:
            self._corrections.clear()  # they made up for all that no plan knew
        for site in self.compressor.tracker.sites.values():
            site.candidates = []
            if site.probed is None or site.importance is None or not site.distortions:
                continue
            widths = site.widths(self.compressor.config.bits)
            every = [
                option
                for codec in site.distortions
                for bits in widths
                for option in [self._option(site, batch, codec, bits)]
            ]
            best = [
                min((o for o in every if o.bits == bits), key=lambda o: (o.cost, o.nbytes))
                for bits in widths
            ]
            kept = {(o.codec, o.bits): None for o in [*lower_hull(every), *best]}
            site.candidates = [(c, b) for c, b in kept if c is not None and b is not None]
            # The codebooks of all others need not stay.
            site.distortions = {c: site.distortions[c] for c, _ in site.candidates}
            self.compressor.placement.calibrated = True
        self.forget()

    def share_times(self, ranks: Ranks) -> None:
        """Let the first rank's clock stand for all: plans must not differ by it."""
        self._times.known = ranks.broadcast(self._times.known, 0)

    def plan(self, key: Any, batch: Batch, limit_bytes: float | None = None) -> Plan:
        """The plan for inputs of this signature and size, under the budget or another limit."""
        self._count_forward()
        limit = self.compressor.arena.limit_bytes if limit_bytes is None else limit_bytes
        limit = (limit - self._base) / self._overlap  # see shared()
        missed = self._correction(key, batch, limit)
        case = (key, batch, limit, missed)
        plan = self._plans.get(case)
        if plan is None:
            plan = self.under(self._choices_with(missed, batch), limit)
            self._tell_of_time(plan)
            _keep(self._plans, case, plan, _PLANS_KEPT)
        known = self.compressor.placement.calibrated
        self.least_bytes = round(self.shared(plan.least_bytes)) if known else 0
        return plan

    def shared(self, nbytes: float) -> float:
        """The budget under which each forward pass may take so many bytes.

        Several may be held at once, and what was saved before the first of them.
        """
        return nbytes * self._overlap + self._base

    def apply(self, plan: Plan) -> None:
        """Tell the sites."""
        for site in self.compressor.tracker.sites.values():
            site.option = plan.options.get(site)

    def learn_from(self, key: Any, plan: Plan, wanted_bytes: int) -> None:
        """Correct for what a plan did not foresee, if it did matter.

        That depends on the plan a little. So each budget has a correction of its own, and one that
        was never met before takes the last one learnt. How much of a batch is padding is another
        matter with each: what one was off by tells of the next.
        """
        missed, limit = wanted_bytes - plan.nbytes - plan.forgone_bytes, plan.limit_bytes
        if self._overlap == 1:
            known = self._correction(key, plan.batch, limit)
            known += missed if abs(missed) > 0.002 * limit else 0
            size = _of_any_padding(plan.batch)
            for case in ((key, size), (key, size, limit)):
                _keep(self._corrections, case, known, 2 * _PLANS_KEPT)

    def _correction(self, key: Any, batch: Batch, limit: float) -> int:
        size = _of_any_padding(batch)
        latest = self._corrections.get((key, size), 0)
        return self._corrections.get((key, size, limit), latest)

    def _count_forward(self) -> None:
        """Several forward passes before one backward share the budget."""
        held, limit = self.compressor.arena.held_bytes, self.compressor.arena.limit_bytes
        share = _EMPTY_SHARE * limit
        if not self._forwards or held < self._base + share:
            # What is held before the first of them is no part of any: it was saved outside the
            # model (a checkpoint around it, embeddings). Small differences make no other plan.
            if self._forwards:
                self._rounds = [*self._rounds, self._forwards][-_ROUNDS_KEPT:]
            self._forwards = 0
            self._base = math.ceil(held / share) * share if held >= share else 0
        self._forwards = min(self._forwards + 1, _FORWARDS_MAX)

    @property
    def _overlap(self) -> int:
        """Forward passes that are held at once: the most of the last rounds."""
        return max(1, self._forwards, *self._rounds)

    def choices(self, key: Any, batch: Batch) -> Choices:
        """What there is to choose from for inputs of this signature and size.

        What no calibration measures is fixed, in the most bits: nobody knows that fewer would do.
        """
        missed = self._corrections.get((key, _of_any_padding(batch)), 0)
        choices = self._collected(batch)
        return dataclasses.replace(choices, fixed_bytes=choices.fixed_bytes + missed)

    def _collected(self, batch: Batch) -> Choices:
        choices = self._choices.get(batch)
        if choices is None:
            choices = self._collect(batch)
            _keep(self._choices, batch, choices, _CHOICES_KEPT)
        return choices

    def _choices_with(self, missed_bytes: int, batch: Batch) -> Choices:
        choices = self._collected(batch)
        unmeasured = self._unmeasured(missed_bytes)
        fixed = choices.fixed_bytes + (0 if unmeasured else missed_bytes)
        return dataclasses.replace(choices, fixed_bytes=fixed, unmeasured=unmeasured)

    def _unmeasured(self, missed_bytes: int) -> tuple[Option, ...]:
        """Options of what a loss outside the model saves, by the bytes that no plan foresaw.

        They cost what they do when room is made in a step (:mod:`daf_hf.placement`): what is
        measured gives way to them no further than it would there.
        """
        sites = self.compressor.tracker.sites.values()
        count = sum(site.is_unmeasured for site in sites)
        if missed_bytes <= 0 or not count:
            return ()
        codec = self.compressor.placement.candidates.unplanned(frugal=False)
        costs = tuple(count * cost for cost in UNPLANNED_COSTS)
        allowed = self.compressor.config.bits
        return tuple(
            Option(missed_bytes * bits // max(1, *allowed), costs[bits], codec, bits, costs)
            for bits in allowed
        )

    def _collect(self, batch: Batch) -> Choices:
        """What the sites offer for a batch of this size, whatever the budget."""
        fixed, binary, options = 0, 0, {}
        for site in self.compressor.tracker.sites.values():
            if site.probed is None:
                continue
            if not site.candidates or _is_small(site, batch):
                fixed += self._fixed_bytes(site, batch)
                if _takes_a_plane(site, batch):
                    binary += elements_of(site, batch)
                continue
            encoded = [self._option(site, batch, codec, bits) for codec, bits in site.candidates]
            options[site] = [*encoded, self._exact(site, batch)]
        return Choices(batch, fixed, binary, options)

    def unmeasured_bytes(self, batch: Batch) -> int:
        """The least that a batch takes where there was no room to calibrate.

        Noise is then not drawn again, and nothing is derived.
        """
        placement, allowed = self.compressor.placement, self.compressor.config.bits
        codec = placement.candidates.unplanned(frugal=True)
        total = 0
        for site in self.compressor.tracker.sites.values():
            if site.probed is None:
                continue
            numel, cols = site.probed.predict(batch)
            nbytes = numel * site.dtype.itemsize
            if site.compressible and nbytes >= SMALLEST_BYTES:
                nbytes = numel * site.exact_size
                widths = site.widths(allowed)
                book, bits = (BINARY, 1) if site.two_valued else (codec, min(widths, default=0))
                if site.two_valued or (site.dtype in COMPRESSIBLE and widths):
                    nbytes = book.layout(numel, cols or 1, bits).pages(bits) * PAGE_COST
            total += nbytes * site.probed.uses
        return total

    def under(self, choices: Choices, limit_bytes: float) -> Plan:
        """The plan under a limit; it is not remembered."""
        offered = choices.options
        budget = limit_bytes - choices.fixed_bytes
        config = self.compressor.config
        limit = config.time_budget * self._plain_seconds(choices.batch)
        sites = choices.sites()
        every, least_seconds = allocate_in_time(config.allocator, sites, budget, limit)
        nbytes = choices.fixed_bytes + sum(option.nbytes for option in every)
        chosen, unmeasured = every[: len(offered)], every[len(offered) :]
        return Plan(
            choices.batch,
            dict(zip(offered, chosen, strict=True)),
            nbytes,
            math.sqrt(sum(option.cost for option in chosen)) if chosen else math.nan,
            choices.binary_elements,
            choices.least_bytes,
            least_seconds,
            limit_bytes,
            choices.unmeasured_bytes - sum(option.nbytes for option in unmeasured),
        )

    def _tell_of_time(self, plan: Plan) -> None:
        """Warn, once a run, where the time budget cannot be kept to."""
        if plan.least_seconds is None or self._warned:
            return
        self._warned = True
        logger.warning(
            "daf_hf: time_budget=%g cannot be kept to under budget_mb=%g: time_budget=%.2g "
            "would do, or a larger budget. The bytes come first; time is not limited.",
            self.compressor.config.time_budget,
            self.compressor.arena.limit_bytes / 1e6,
            _rounded_up(plan.least_seconds / self._plain_seconds(plan.batch)),
        )

    def _plain_seconds(self, batch: Batch) -> float:
        """Of plain training's forward and backward pass; inf where that is not known."""
        if self.token_seconds is None:
            return math.inf
        return self.token_seconds * batch.examples * batch.tokens

    def _option(self, site: SaveSite, batch: Batch, codec: Any, bits: int) -> Option:
        assert site.probed is not None and site.importance is not None
        numel, cols = site.probed.predict(batch, site.live)
        cols = cols if cols and numel % cols == 0 else 1
        pages = codec.layout(numel, cols, bits).pages(bits)
        costs = site.costs(codec)
        nbytes = pages * PAGE_COST
        if site.matched:
            nbytes += statistics_bytes(numel, cols)
        nbytes = nbytes * site.probed.uses + _witness_bytes(site)
        seconds = 0.0
        if math.isfinite(self.compressor.config.time_budget):
            seconds = self._times.seconds(codec, bits, numel, site.dtype) * site.probed.uses
        return Option(nbytes, costs[bits], codec, bits, costs, site.importance, seconds)

    def _exact(self, site: SaveSite, batch: Batch) -> Option:
        assert site.probed is not None and site.importance is not None
        numel, _ = site.probed.predict(batch, site.live)
        nbytes = numel * site.dtype.itemsize * site.probed.uses
        return Option(nbytes + _witness_bytes(site), 0.0, None, None, importance=site.importance)

    def _fixed_bytes(self, site: SaveSite, batch: Batch) -> int:
        assert site.probed is not None
        numel, cols = site.probed.predict(batch, site.live)
        nbytes = numel * site.dtype.itemsize
        if site.derived and nbytes >= SMALLEST_BYTES:
            return _witness_bytes(site)
        if nbytes >= SMALLEST_BYTES:
            nbytes = numel * site.exact_size
        if site.two_valued and nbytes >= SMALLEST_BYTES:
            nbytes = BINARY.layout(numel, cols or 1, 1).pages(1) * PAGE_COST
            if site.keep is not None:
                nbytes = min(nbytes, STATE_BYTES)
        return nbytes * site.probed.uses + _witness_bytes(site)


def _of_any_padding(batch: Batch) -> Batch:
    return dataclasses.replace(batch, unpadded=None)


def _keep(known: OrderedDict[Any, Any], case: Any, value: Any, most: int) -> None:
    """Remember a value, and forget the oldest beyond so many."""
    known[case] = value
    if len(known) > most:
        known.popitem(last=False)


def _rounded_up(share: float) -> float:
    """To two digits, so that what is printed suffices."""
    unit = 10.0 ** (math.floor(math.log10(share)) - 1)
    return math.ceil(share / unit) * unit


def _takes_a_plane(site: SaveSite, batch: Batch) -> bool:
    """Whether a site's two-valued tensors are stored at a bit an element."""
    assert site.probed is not None
    numel, _ = site.probed.predict(batch)
    drawn = site.keep is not None and numel >= SMALLEST_ELEMENTS
    large = numel * site.dtype.itemsize >= SMALLEST_BYTES
    return large and site.two_valued and not drawn and not site.derived


def _is_small(site: SaveSite, batch: Batch) -> bool:
    """Whether a site's tensors are kept exactly for their size."""
    assert site.probed is not None
    return site.probed.predict(batch, site.live)[0] * site.dtype.itemsize < SMALLEST_BYTES


def _witness_bytes(site: SaveSite) -> int:
    """What is noted of a tensor from which others follow."""
    if not site.feeds or site.probed is None:
        return 0
    return WITNESSES * site.dtype.itemsize * site.probed.uses
