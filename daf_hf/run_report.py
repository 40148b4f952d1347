"""``daf-hf report``: budget, held bytes, mean bits and loss over the steps of a run."""

from __future__ import annotations

import base64
import html
import json
import math
from io import BytesIO
from pathlib import Path
from typing import Any

STATE = "trainer_state.json"
FIGURES = {
    "daf/budget_mb": "budget, MB",
    "daf/held_mb": "held, MB",
    "daf/mean_bits": "mean bits",
    "loss": "loss",
}
"""What is shown of each logged step, and its unit."""

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:16px sans-serif;margin:2em auto;max-width:60em}} img{{max-width:100%}}
td,th{{padding:0 1em;text-align:right}}</style>
<h1>{title}</h1>
<img alt="budget, held bytes, mean bits and loss" src="data:image/png;base64,{image}">
<table><tr>{head}</tr>
{rows}
</table></html>
"""


def read_log(run: str | Path) -> list[dict[str, float]]:
    """The logged steps of a run in which there was a budget.

    Args:
        run: its output folder (the last checkpoint in it counts), a checkpoint's folder, or a
            ``trainer_state.json``.

    Raises:
        FileNotFoundError: there is no ``trainer_state.json``; says how one is made.
        ValueError: it cannot be read, or nothing was logged under a budget.
    """
    path = _state_file(Path(run))
    try:
        logged = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        rows = [
            {"step": int(row["step"]), **{n: float(row[n]) for n in FIGURES if n in row}}
            for row in logged
            if "daf/held_mb" in row
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the state of a Trainer ({error!r})") from error
    if not rows:
        raise ValueError(
            f"{path} has no steps that were logged with DAFCallback: see logging_steps"
        )
    return rows


def _state_file(run: Path) -> Path:
    if run.is_file():
        return run
    found = [run / STATE, *run.glob(f"checkpoint-*/{STATE}")]
    found = [path for path in found if path.is_file()]
    if not found:
        raise FileNotFoundError(
            f"{run} has no {STATE}: it comes with checkpoints or trainer.save_state()"
        )
    return max(found, key=lambda path: path.stat().st_mtime)


def save_report(run: str | Path, png: str | Path, page: str | Path) -> None:
    """Draw a run's log into a PNG file and a page of HTML that needs no other file.

    Raises:
        ImportError: without matplotlib.
        FileNotFoundError, ValueError: see :func:`read_log`.
        OSError: when a file cannot be written.
    """
    rows = read_log(run)
    image = _draw(rows)
    Path(png).write_bytes(image)
    cells = [[_cell(row.get(name)) for name in ("step", *FIGURES)] for row in rows]
    text = _PAGE.format(
        title=f"daf_hf: {html.escape(str(run))}",
        image=base64.b64encode(image).decode(),
        head="".join(f"<th>{name}</th>" for name in ("step", *FIGURES.values())),
        rows="\n".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in cells),
    )
    Path(page).write_text(text, encoding="utf-8")


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.5g}"


def _draw(rows: list[dict[str, float]]) -> bytes:
    from matplotlib.figure import Figure  # here: only those who want a picture need it

    figure = Figure(figsize=(8, 8), layout="constrained")
    memory, bits, loss = figure.subplots(3, sharex=True, height_ratios=(2, 1, 1))
    # Dashed, so that what is held shows where it is as much.
    budget: dict[str, Any] = {"linestyle": "--", "zorder": 3}
    for axes, name, label, style in (
        (memory, "daf/budget_mb", "budget", budget),
        (memory, "daf/held_mb", "held, at most", {}),
        (bits, "daf/mean_bits", None, {}),
        (loss, "loss", None, {}),
    ):
        points = [(row["step"], row.get(name, math.nan)) for row in rows]
        drawn = {"drawstyle": "steps-mid"} if axes is memory else {}
        axes.plot(*zip(*points, strict=True), marker=".", label=label, **drawn, **style)
    memory.set_ylabel("MB")
    memory.set_ylim(0, 1.05 * memory.get_ylim()[1])  # a line along the edge would be half a line
    memory.legend()
    bits.set_ylabel("mean bits")
    loss.set_ylabel("loss")
    loss.set_xlabel("step")
    loss.xaxis.get_major_locator().set_params(integer=True)
    out = BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
