r"""Where does the memory go, plainly and under a budget, and what does that cost in accuracy?

Draws one picture from runs of `examples/glue/run_glue.py`: memory by component for plain
training and for DAF, and beside it the metric of every seed. All it reads is what the runs left in
their output folders.

    python benchmarks/plot_memory.py outputs/roberta-daf --plain outputs/roberta-plain \
        --title "roberta-base, LoRA, batch 32 x 128: memory" \
        --metric_title "MiniLM-L6, LoRA, SST-2: accuracy" \
        --metric accuracy eval_accuracy 'outputs/sst2-plain-*' 'outputs/sst2-daf-*'

The panels may be of different models and tasks: each title says which.

The first folder holds a ``daf_report.json``, that of ``--plain`` the ``all_results.json`` of a run
with ``--no_daf``; without it, what is transient in plain training is unknown, and left out of both
bars. Quoted patterns stand for one folder a seed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

PEAK = "train_peak_rss_above_model_bytes"
COMPONENTS = {  # in the order of the bars' segments, with their colours
    "weights": "#cbd2d9",
    "gradients": "#7b8794",
    "optimizer": "#3e4c59",
    "activations, exact": "#1d4ed8",
    "activations, encoded": "#60a5fa",
    "transient": "#f0c987",
}
PLAIN_COLOUR, DAF_COLOUR = "#7b8794", "#1d4ed8"
LABELLED_SHARE = 0.06  # of the longest bar; narrower segments are told by the legend alone

Bar = dict[str, float]


@dataclass(frozen=True)
class Metric:
    """One metric of one task, a value for each seed."""

    label: str
    plain: tuple[float, ...]
    daf: tuple[float, ...]


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def bars(report: dict[str, Any], peaks: tuple[float, float] | None) -> tuple[Bar, Bar]:
    """Bytes by component of plain training and of DAF.

    Args:
        report: a ``daf_report.json``.
        peaks: peak memory above the loaded model of the plain run and of DAF's, from which
            follows what is transient; None leaves it out.
    """
    same = {
        "weights": report["weight_bytes"],
        "gradients": report["gradient_bytes"],
        "optimizer": report["optimizer_bytes"],
    }
    plain = {**same, "activations, exact": report["plain_bytes"], "activations, encoded": 0}
    daf = {
        **same,
        "activations, exact": report["exact_bytes_peak"],
        "activations, encoded": report["stored_bytes_peak"],
    }
    for bar, peak in zip((plain, daf), peaks or (), strict=False):
        bar["transient"] = max(0, peak - sum(bar.values()) + bar["weights"])
    return plain, daf


def read_metric(label: str, name: str, plain: str, daf: str) -> Metric:
    """A metric from the ``all_results.json`` of all folders that match the two patterns.

    Raises:
        SystemExit: when a pattern matches none.
    """
    values = []
    for pattern in (plain, daf):
        files = sorted(glob(f"{pattern}/all_results.json"))
        if not files:
            raise SystemExit(f"{pattern}: no such folder with an all_results.json in it")
        values.append(tuple(read_json(Path(file))[name] for file in files))
    return Metric(label, *values)


def draw_memory(axes: Axes, plain: Bar, daf: Bar, title: str) -> None:
    """Two stacked bars; the legend gives every component's MB in both."""
    longest = max(sum(plain.values()), sum(daf.values()))
    for row, bar in enumerate((plain, daf)):
        left = 0.0
        for name, colour in COMPONENTS.items():
            value = bar.get(name, 0)
            axes.barh(row, value / 1e6, left=left / 1e6, color=colour, height=0.55)
            if value >= LABELLED_SHARE * longest:
                axes.text(
                    (left + value / 2) / 1e6,
                    row,
                    f"{value / 1e6:,.0f}",
                    ha="center",
                    va="center",
                    color="white" if name in ("optimizer", "activations, exact") else "black",
                )
            left += value
        axes.text(left / 1e6, row, f"  {left / 1e6:,.0f} MB", va="center", weight="bold")
    for name, colour in COMPONENTS.items():
        if name in plain:
            text = f"{name}: {plain[name] / 1e6:,.1f} / {daf[name] / 1e6:,.1f}"
            axes.barh(0, 0, color=colour, label=text)
    axes.set_yticks((0, 1), ("plain", "DAF"))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, longest / 1e6 * 1.14)
    axes.set_xlabel("MB")
    axes.set_title(title, fontsize=11, loc="left")
    axes.legend(
        title="MB, plain / DAF:",
        alignment="left",
        frameon=False,
        ncols=2,
        fontsize=9,
        loc="upper left",
        bbox_to_anchor=(0, -0.26),
    )


def draw_metrics(axes: Axes, metrics: Sequence[Metric], title: str) -> None:
    """A dot for each seed, a line for the mean."""
    for row, metric in enumerate(metrics):
        sides = (("plain", metric.plain, PLAIN_COLOUR), ("DAF", metric.daf, DAF_COLOUR))
        for offset, (name, values, colour) in zip((-0.14, 0.14), sides, strict=True):
            y = row + offset
            percent = [100 * value for value in values]
            label = name if row == 0 else None
            axes.plot(percent, [y] * len(percent), "o", color=colour, alpha=0.4, ms=5)
            axes.plot(mean(percent), y, "|", color=colour, ms=16, mew=3, label=label)
            place = {"transform": axes.get_yaxis_transform(), "va": "center", "weight": "bold"}
            axes.text(1.02, y, f"{mean(percent):.1f}", color=colour, **place)
    axes.set_yticks(range(len(metrics)), [metric.label for metric in metrics])
    axes.set_ylim(len(metrics) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.15)
    axes.set_xlabel("% (dot: one seed, bar: mean)")
    axes.set_title(title, fontsize=11, loc="left")
    axes.legend(frameon=False, ncols=2, fontsize=9, loc="upper left", bbox_to_anchor=(0, -0.26))


def draw(
    plain: Bar, daf: Bar, metrics: Sequence[Metric], titles: tuple[str, str], path: Path
) -> None:
    """Write the picture to ``path``; the titles are those of memory and metrics."""
    figure, panels = pyplot.subplots(
        1,
        2 if metrics else 1,
        figsize=(11 if metrics else 7, 3.6),
        width_ratios=(1.8, 1) if metrics else None,
        layout="constrained",
        squeeze=False,
    )
    draw_memory(panels[0, 0], plain, daf, titles[0])
    if metrics:
        draw_metrics(panels[0, 1], metrics, titles[1])
    for axes in figure.axes:
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("daf", type=Path, help="output folder of a run under a budget")
    parser.add_argument("--plain", type=Path, help="output folder of the plain run")
    parser.add_argument(
        "--metric",
        nargs=4,
        action="append",
        default=[],
        metavar=("LABEL", "NAME", "PLAIN", "DAF"),
        help="a metric's name in all_results.json, and patterns of the runs' folders",
    )
    parser.add_argument(
        "--title",
        required=True,
        help="of the memory panel: names model and batch",
    )
    parser.add_argument(
        "--metric_title",
        help="of the metric panel: names model and task; needed with --metric",
    )
    parser.add_argument("--output", type=Path, default=Path("docs/memory.png"))
    options = parser.parse_args(argv)
    if options.metric and not options.metric_title:
        parser.error("--metric needs --metric_title, which names its model and task")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_arguments(argv)
    peaks = None
    if options.plain is not None:
        folders = (options.plain, options.daf)
        peaks = tuple(read_json(folder / "all_results.json")[PEAK] for folder in folders)
    plain, daf = bars(read_json(options.daf / "daf_report.json"), peaks)
    metrics = [read_metric(*metric) for metric in options.metric]
    draw(plain, daf, metrics, (options.title, options.metric_title or ""), options.output)
    print(f"Picture: {options.output}")


if __name__ == "__main__":
    main()
