"""What a plan for any budget says, as figures and as tables for people."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .accounting import jsonable
from .tables import measured, megabytes, render_table

SITES_SHOWN = 8
NAME_WIDTH = 26
"""Of the table of sites: rows, and characters of a name."""

CUT = ".."
"""What stands for the rest of a longer one."""


@dataclass(frozen=True)
class PlannedBudget:
    """One budget, and the plan that it buys.

    Attributes:
        budget_bytes: the budget.
        planned_bytes: what the plan expects to hold, at most the budget. This and all that
            follows are NaN where the fewest bits take more than the budget.
        ratio: plain bytes over planned bytes.
        mean_bits: mean width of the elements that are encoded; NaN without any.
        predicted_gradient_error: relative; see :class:`daf_hf.MemoryReport`.
        marks: ``least``, ``recommended``, ``dropout`` (the error is that of another dropout
            seed), ``plain`` and ``asked`` (``budget_mb`` of the options), as they apply.
    """

    budget_bytes: int
    planned_bytes: float
    ratio: float
    mean_bits: float
    predicted_gradient_error: float
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedSite:
    """One save site under the recommended budget. Bytes are for one forward pass of the batch.

    Attributes:
        name, consumer, shape, dtype: where and what is saved, and what reads it.
        plain_bytes, planned_bytes: exactly stored, and as planned.
        codec, bits: the plan; bits are None where the site is stored exactly.
        importance: squared relative gradient error per unit of distortion.
        price: importance times plain bytes; the sites are sorted by it, dearest first.
    """

    name: str
    consumer: str
    shape: tuple[int, ...]
    dtype: str
    plain_bytes: int
    planned_bytes: int
    codec: str
    bits: int | None
    importance: float
    price: float


@dataclass(frozen=True)
class BudgetPlan:
    """What :func:`daf_hf.plan` found. Sizes are in bytes.

    Attributes:
        plain_bytes: what plain training holds for backward of this batch, parameters and buffers
            excluded.
        least_bytes: the least budget that a run can begin with.
        calibration_bytes: the least budget under which training can calibrate on this batch.
        recommended_bytes: the least budget with a predicted error of at most ``error_allowed``
            (and not below ``calibration_bytes``).
        error_allowed: :data:`daf_hf.budgets.RECOMMENDED_ERROR`.
        dropout_error: relative change of the gradient when nothing but dropout's seed changes,
            ``|g1 - g2| / |g1|``, on the examples and in the norm that the predicted errors are
            measured with; NaN where the model draws no noise.
        budgets: rows by ascending budget.
        sites: all sites that have a choice, under the recommended budget.
    """

    plain_bytes: int
    least_bytes: int
    calibration_bytes: int
    recommended_bytes: int
    error_allowed: float
    dropout_error: float
    budgets: tuple[PlannedBudget, ...]
    sites: tuple[PlannedSite, ...]

    @property
    def recommended_mb(self) -> float:
        """The recommended ``budget_mb``."""
        return self.recommended_bytes / 1e6

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, JSON-ready but for NaN."""
        return dataclasses.asdict(self)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the figures to ``path`` as JSON (NaN as null)."""
        text = json.dumps(jsonable(self.to_dict()), indent=1, allow_nan=False)
        Path(path).write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        return f"{self._budget_table()}\n\n{self._site_table()}"

    def _budget_table(self) -> str:
        rows = [
            (
                ", ".join(row.marks),
                f"{row.budget_bytes / 1e6:,.6g}",
                _figure(row.ratio, ".1f"),
                _figure(row.mean_bits, ".2f"),
                _figure(row.predicted_gradient_error, ".2g"),
            )
            for row in self.budgets
        ]
        return render_table(
            "daf_hf: budgets",
            ("", "budget MB", "ratio", "mean bits", "predicted gradient error"),
            rows,
            4,
            "\n".join(self._notes()),
        )

    def _notes(self) -> list[str]:
        notes = [
            f"recommended: budget_mb={self.recommended_mb:g}, the least with a predicted error of "
            f"at most {self.error_allowed:g} and room to calibrate",
            f"plain training holds {megabytes(self.plain_bytes)} MB",
        ]
        if not math.isnan(self.dropout_error):
            change = measured(self.dropout_error)
            notes.append(f"dropout: another seed alone changes the gradient by {change}")
        if self.calibration_bytes > self.least_bytes:
            least = megabytes(self.calibration_bytes)
            notes.append(f"below {least} MB training has no room to calibrate on this batch")
        return notes

    def _site_table(self) -> str:
        rows = [
            (
                _short(site.name),
                _first(site.consumer),
                "x".join(map(str, site.shape)),
                megabytes(site.plain_bytes),
                "exact" if site.bits is None else str(site.bits),
                f"{site.importance:.2g}",
            )
            for site in self.sites[:SITES_SHOWN]
        ]
        return render_table(
            "daf_hf: dearest save sites under the recommended budget",
            ("site", "read by", "shape", "plain MB", "bits", "importance"),
            rows,
            4,
            f"{len(self.sites)} sites have a choice; dearest is what has most importance x bytes",
        )


def _figure(value: float, form: str) -> str:
    return "-" if math.isnan(value) else f"{value:{form}}"


def _short(name: str) -> str:
    """The end of a long name, and before it the layer's number if that is not in the end."""
    if len(name) <= NAME_WIDTH:
        return name
    layer = re.search(r"(?<=\.)\d+\.", name)
    kept = NAME_WIDTH - len(CUT)
    head = layer.group() if layer and layer.start() < len(name) - kept else ""
    return f"{head}{CUT}{name[len(head) - kept :]}"


def _first(consumer: str) -> str:
    """The first of several consumers, without what all their names have."""
    first, *others = consumer.replace("Backward0", "").split()
    return f"{first} +{len(others)}" if others else first
