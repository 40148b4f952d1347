"""What budgets would do, by the importances that a calibration measured."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from typing import Any

import psutil
import torch

from .planning import Planner
from .plans import Plan
from .sites import Batch

logger = logging.getLogger("daf_hf")

RECOMMENDED_ERROR = 0.25
"""Predicted gradient error up to which a budget is recommended.

Measured with LoRA on MiniLM-L6 (docs/results.md): 0.20 to 0.23 lost 0.3 points on MRPC (mean of 3
seeds, ratio 20) and 0.17 none on SST-2 (ratio 25); 0.26 to 0.31 lost a point on MRPC. The limit is
put between the last that lost next to nothing and the first that lost a point.
"""

HARMFUL_ERROR = 0.3
"""Predicted gradient error above which a run is warned.

Same measurements: on MRPC a point was lost at about 0.3, 1.4 at 0.36, and 5 at 0.67.
"""

FREE_SHARE = 0.5
"""Of the free memory, what a calibration may hold where no budget says so."""

_STEP = 1.01
"""Ratio of the budgets among which the least sufficient one is looked for."""


class BudgetSweep:
    """Plans for one batch under any number of budgets.

    Args:
        planner: of a session or compressor that was calibrated.
        key: the inputs' signature.
        batch: their size.

    Attributes:
        least_bytes: what the smallest plan takes.
        exact_bytes: what the plan takes that stores every site exactly; its error is 0.
    """

    def __init__(self, planner: Planner, key: Any, batch: Batch) -> None:
        self._planner = planner
        self._batch = batch
        self._choices = planner.choices(key, batch)
        self.least_bytes = self._choices.least_bytes
        self.exact_bytes = self._choices.exact_bytes

    def at(self, budget_bytes: float) -> Plan:
        """The plan under a budget; one that is too small gets the smallest plan."""
        return self._planner.under(self._choices, budget_bytes)

    def feasible_bytes(self, calibration_bytes: float) -> int:
        """The least budget that a run can begin with.

        Args:
            calibration_bytes: the least that a calibration needs; below it, what nobody could
                measure must fit.
        """
        unmeasured = self._planner.unmeasured_bytes(self._batch)
        return max(self.least_bytes, min(math.ceil(calibration_bytes), unmeasured))

    def budget_for(self, error: float) -> int:
        """The least budget, in bytes, whose predicted gradient error is at most ``error``.

        To within 1 % or the third digit, upwards. O(log n) plans, n the ratio of
        :attr:`exact_bytes` to :attr:`least_bytes`.
        """
        least = max(1, self.least_bytes)
        steps = math.ceil(math.log(max(1.0, self.exact_bytes / least), _STEP))

        def budget(step: int) -> int:
            return round_up(least * _STEP**step)

        enough = bisect_left(range(steps), True, key=lambda k: self.at(budget(k)).error <= error)
        return budget(enough)

    def recommended(self, calibration_bytes: float) -> int:
        """The least budget, in bytes, with at most ``RECOMMENDED_ERROR``.

        Args:
            calibration_bytes: the least that calibrations in the run need; it is not less.
        """
        least = self._planner.shared(self.budget_for(RECOMMENDED_ERROR))
        return max(math.ceil(least), round_up(calibration_bytes))

    def warn_of(self, plan: Plan, budget_bytes: float, calibration_bytes: float) -> None:
        """Warn of a plan whose error is above ``HARMFUL_ERROR``, made for so many bytes."""
        logger.warning(
            "daf_hf: budget_mb=%g: the predicted gradient error is %.2g, and above %g accuracy "
            "was lost where we measured it; for batches of this size budget_mb=%g would bring it "
            "to %g. `daf-hf plan` shows what other budgets do.",
            budget_bytes / 1e6,
            plan.error,
            HARMFUL_ERROR,
            self.recommended(calibration_bytes) / 1e6,
            RECOMMENDED_ERROR,
        )


def round_up(nbytes: float) -> int:
    """The next number of bytes of three significant digits."""
    whole = math.ceil(nbytes)
    unit = 10 ** max(0, len(str(whole)) - 3)
    return -(-whole // unit) * unit


def probe_room(device: torch.device) -> float:
    """Bytes that a calibration may hold on a device where there is no budget yet.

    ``FREE_SHARE`` of what is free: a backward pass needs the rest. A calibration takes less where
    ``calibration_batch`` examples do.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    elif device.type == "cpu":
        free = psutil.virtual_memory().available
    else:
        return math.inf
    return FREE_SHARE * free
