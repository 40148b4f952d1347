"""The table of accuracy.py, from what its runs left in their folders."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from accuracy_settings import PLAIN, SCORES, Setting
from rich.box import SIMPLE_HEAD
from rich.table import Table

PEAK = "train_peak_rss_above_model_bytes"
COLUMNS = (
    "task", "setting", "metric", "mean", "sd", "seeds", "against plain", "sd", "ratio", "held MB",
    "peak RSS MB", "seconds", "predicted error", "mean bits",
)  # fmt: skip
LEGEND = """\
Metrics in points (x 100): mean and sample standard deviation over the seeds. *Against plain*: mean
and standard deviation of the differences by seed. Further columns are means. *Held*: all bytes held
for backward at the worst moment, MB of 10^6 bytes (of plain training as DAF's runs count them);
*ratio*: plain training's over that. *Peak RSS*: above the model, in training. *Predicted error*: of
the gradient, under the last plan. *Mean bits*: of what is encoded.
"""


@dataclass(frozen=True)
class Finished:
    """What a finished run left.

    Attributes:
        results: ``all_results.json``.
        report: ``daf_report.json``; None for plain training.
    """

    task: str
    setting: Setting
    seed: int
    results: dict[str, Any]
    report: dict[str, Any] | None

    def points(self, score: str) -> float:
        """A metric, x 100."""
        return 100 * self.results[f"eval_{score}"]


@dataclass(frozen=True)
class Row:
    """A task under a setting. Metrics are in points, means over the seeds unless said otherwise.

    What no run tells is None: standard deviations of one seed, differences without a plain run of
    the same seed, an error that was not predicted.

    Attributes:
        metric: the metric that counts for the task.
        scores: of every seed; ``mean`` and ``sd`` (of the sample) are theirs.
        others: means of the task's other metrics.
        differences: to plain training with the same seed; ``difference`` and ``difference_sd`` are
            their mean and standard deviation.
        ratio: ``plain_mb / held_mb``, run by run.
        plain_mb, held_mb: MB held for backward at the worst moment.
        peak_rss_mb: peak of resident memory in training above what was resident before.
        seconds: of training.
        predicted_error: relative error of the gradient.
        mean_bits: of encoded elements.
    """

    task: str
    setting: str
    metric: str
    scores: dict[int, float]
    mean: float
    sd: float | None
    others: dict[str, float]
    differences: dict[int, float]
    difference: float | None
    difference_sd: float | None
    ratio: float | None
    plain_mb: float | None
    held_mb: float | None
    peak_rss_mb: float
    seconds: float
    predicted_error: float | None
    mean_bits: float | None


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def read_results(folder: Path, task: str) -> dict[str, Any] | None:
    """``all_results.json`` of a run; None until the scores, which come last, are in it."""
    try:
        results = read_json(folder / "all_results.json")
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return results if f"eval_{SCORES[task][0]}" in results else None


def read_runs(out: Path) -> tuple[list[Finished], list[str]]:
    """The finished runs below ``out``, in the table's order, and the titles of all others."""
    finished, unfinished = [], []
    for path in sorted(out.glob("*/*/*/run.json")):
        record, folder = read_json(path), path.parent
        setting = Setting.parse(record["setting"])
        results = read_results(folder, record["task"])
        if results is None:
            reason = _last_line(folder / "log.txt")
            unfinished.append(
                f"{record['task']} {setting.name} seed {record['seed']}"
                + (f" ({reason})" if reason else "")
            )
            continue
        report = None if setting.policy == PLAIN else read_json(folder / "daf_report.json")
        finished.append(Finished(record["task"], setting, record["seed"], results, report))
    tasks = list(SCORES)
    finished.sort(key=lambda run: (tasks.index(run.task), *run.setting.order, run.seed))
    return finished, unfinished


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def build_rows(runs: Sequence[Finished]) -> list[Row]:
    """A row for each task and setting, in the order of the runs."""
    groups: dict[tuple[str, str], list[Finished]] = {}
    for run in runs:
        groups.setdefault((run.task, run.setting.name), []).append(run)
    return [
        _row(
            group,
            plain={run.seed: run for run in groups.get((task, PLAIN), [])},
            plain_bytes=_plain_bytes(run for run in runs if run.task == task),
        )
        for (task, _), group in groups.items()
    ]


def _plain_bytes(runs: Iterable[Finished]) -> dict[int, int]:
    """Bytes that plain training holds, by seed: the first run that counts them tells."""
    found: dict[int, int] = {}
    for run in runs:
        if run.report is not None:
            found.setdefault(run.seed, run.report["plain_bytes"])
    return found


def _row(runs: Sequence[Finished], plain: dict[int, Finished], plain_bytes: dict[int, int]) -> Row:
    task, setting = runs[0].task, runs[0].setting
    metric, *others = SCORES[task]
    scores = {run.seed: run.points(metric) for run in runs}
    differences = {
        seed: score - plain[seed].points(metric) for seed, score in scores.items() if seed in plain
    }
    reports = [run.report for run in runs if run.report is not None]
    counted = [plain_bytes[run.seed] / 1e6 for run in runs if run.seed in plain_bytes]
    if setting.policy == PLAIN:
        differences, held, ratio = {}, _mean(counted), 1.0
    else:
        held = _mean(report["held_bytes_peak"] / 1e6 for report in reports)
        ratio = _mean(report["ratio"] for report in reports)
    return Row(
        task,
        setting.name,
        metric,
        scores,
        mean(scores.values()),
        _sd(scores.values()),
        {name: mean(run.points(name) for run in runs) for name in others},
        differences,
        _mean(differences.values()),
        _sd(differences.values()),
        ratio,
        _mean(counted),
        held,
        mean(run.results[PEAK] / 1e6 for run in runs),
        mean(run.results["train_runtime"] for run in runs),
        _mean(report["predicted_gradient_error"] for report in reports),
        _mean(report["mean_bits"] or None for report in reports),  # 0: nothing is encoded
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean; None where there is nothing, or where one is unknown."""
    known = list(values)
    numbers = [value for value in known if value is not None and math.isfinite(value)]
    return mean(numbers) if numbers and len(numbers) == len(known) else None


def _sd(values: Iterable[float]) -> float | None:
    values = list(values)
    return stdev(values) if len(values) > 1 else None


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table as text, in the order of `COLUMNS`."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    others = "".join(f" / {value:.1f}" for value in row.others.values())
    return (
        row.task,
        row.setting,
        " / ".join((row.metric, *row.others)),
        f"{row.mean:.1f}{others}",
        number(row.sd, ".1f"),
        str(len(row.scores)),
        number(row.difference, "+.1f"),
        number(row.difference_sd, ".1f"),
        number(row.ratio, ".1f"),
        number(row.held_mb, ".1f"),
        number(row.peak_rss_mb, ".0f"),
        number(row.seconds, ".0f"),
        number(row.predicted_error, ".2f"),
        number(row.mean_bits, ".2f"),
    )


def markdown(rows: Sequence[Row], unfinished: Sequence[str]) -> str:
    """The table, the scores by seed, and what is missing, as Markdown."""
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS)), *(_line(cells(row)) for row in rows)]
    lines += ["", LEGEND, _line(("task", "setting", "metric by seed")), _line(["---"] * 3)]
    for row in rows:
        by_seed = ", ".join(f"{seed}: {score:.1f}" for seed, score in row.scores.items())
        lines.append(_line((row.task, row.setting, by_seed)))
    if unfinished:
        lines += ["", "Not finished:", "", *(f"- {name}" for name in unfinished)]
    return "\n".join(lines) + "\n"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def terminal_tables(rows: Sequence[Row]) -> list[Table]:
    """A table a task, narrow enough for a terminal."""
    tables: dict[str, Table] = {}
    for row in rows:
        _, setting, metric, score, sd, _, difference, difference_sd, *rest = cells(row)
        if row.task not in tables:
            title = f"{row.task}: {metric} x 100"
            table = tables[row.task] = Table(
                title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
            )
            table.add_column("setting", no_wrap=True)
            for name in ("score", "against plain", "ratio", "held", "RSS", "s", "error", "bits"):
                table.add_column(name, justify="right")
        tables[row.task].add_row(
            setting, _plus_minus(score, sd), _plus_minus(difference, difference_sd), *rest
        )
    return list(tables.values())


def _plus_minus(value: str, deviation: str) -> str:
    return value if deviation == "-" else f"{value} +- {deviation}"


def to_json(rows: Sequence[Row], path: Path) -> None:
    """Write the rows with all their fields, unrounded."""
    text = json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
    path.write_text(text, encoding="utf-8")
