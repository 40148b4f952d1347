"""What a run is warned of: a budget that harms, and what no calibration measures."""

from __future__ import annotations

import logging
import math
from typing import Any

from .budgets import HARMFUL_ERROR, BudgetSweep
from .planning import Planner
from .plans import Plan

logger = logging.getLogger("daf_hf")

UNMEASURED_SHARE = 0.05
"""Of what plain training holds: what may be saved outside of the model without a warning."""


class Advice:
    """Warnings of one session, each given once.

    Args:
        planner: the session's.

    Attributes:
        warned_of: the least budget, in bytes, that was found harmful.
    """

    def __init__(self, planner: Planner) -> None:
        self.warned_of = math.inf
        self._planner = planner
        self._compressor = planner.compressor
        self._told_of_unmeasured = False

    def judge(self, key: Any, plan: Plan, calibration_bytes: float) -> None:
        """Warn of the first harmful plan, and of the first under a lower budget than that.

        A budget that is refused is left to :class:`daf_hf.BudgetError`.

        Args:
            key: the inputs' signature.
            plan: for them, under the present budget.
            calibration_bytes: the least that calibrations in the run need.
        """
        placement, limit = self._compressor.placement, self._compressor.arena.limit_bytes
        measured = placement.calibrated and self._compressor.config.importance == "gradient"
        if not measured or plan.error <= HARMFUL_ERROR or limit >= self.warned_of:
            return
        if placement.refuses and plan.least_bytes > plan.limit_bytes:
            return
        self.warned_of = limit
        BudgetSweep(self._planner, key, plan.batch).warn_of(plan, limit, calibration_bytes)

    def tell_of_unmeasured(self) -> None:
        """Warn where much of what is held was saved by what no calibration can run."""
        sites = self._compressor.tracker.sites.values()
        nbytes = sum(site.nbytes for site in sites if site.is_unmeasured)
        tolerated = UNMEASURED_SHARE * self._compressor.ledger.plain_peak
        if self._told_of_unmeasured or nbytes <= tolerated:
            return
        self._told_of_unmeasured = True
        logger.warning(
            "daf_hf: %.3g MB were saved outside of the model, by a loss for instance. Nothing says "
            "what they are worth: they get 8 bits an element at most, and the predicted gradient "
            "error does not count them. Where the forward of a module around the model computes "
            "the loss, it is measured.",
            nbytes / 1e6,
        )
