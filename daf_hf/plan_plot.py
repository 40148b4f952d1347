"""Budget against predicted gradient error, as a picture."""

from __future__ import annotations

import math
from pathlib import Path

from .budget_plan import BudgetPlan
from .tables import megabytes

LINE, MARK, NOISE = "#1d4ed8", "#3e4c59", "#b45309"


def check_plot(path: str | Path) -> None:
    """See that :func:`save_plot` will be able to draw, before much time is spent.

    Raises:
        ImportError: without matplotlib.
        ValueError: for a file type that it does not write.
    """
    from matplotlib.figure import Figure  # here: only those who want a picture need it

    kinds = Figure().canvas.get_supported_filetypes()
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind not in kinds:
        raise ValueError(f"{path}: use a name that ends in one of {', '.join(sorted(kinds))}")


def save_plot(found: BudgetPlan, path: str | Path) -> None:
    """Draw the budgets with their marks into a file; budgets without error are left out.

    Raises:
        ImportError: without matplotlib.
        OSError: when the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in found.budgets if row.predicted_gradient_error > 0]
    axes.loglog(
        [row.budget_bytes / 1e6 for row in rows],
        [row.predicted_gradient_error for row in rows],
        color=LINE,
        marker=".",
    )
    for label, nbytes in (
        ("least", found.least_bytes),
        ("recommended", found.recommended_bytes),
        ("plain training", found.plain_bytes),
    ):
        budget = nbytes / 1e6
        axes.axvline(budget, color=MARK, linestyle=":", linewidth=1)
        axes.annotate(
            f"{label}, {megabytes(nbytes)} MB",
            (budget, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            rotation=90,
            fontsize="small",
            color=MARK,
        )
    lines = [("error of the recommended", found.error_allowed, LINE)]
    if not math.isnan(found.dropout_error):
        lines.append(("another dropout seed", found.dropout_error, NOISE))
    for label, error, colour in lines:
        axes.axhline(
            error, color=colour, linestyle="--", linewidth=1, label=f"{label}: {error:.2g}"
        )
    axes.set_xlabel("budget, MB")
    axes.set_ylabel("predicted relative error of the gradient")
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(path)
