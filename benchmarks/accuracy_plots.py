"""The pictures of accuracy.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
from accuracy_report import Finished, Row
from accuracy_settings import EXACT, PLAIN, POLICIES, Setting
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

COLOURS = dict(zip(POLICIES, pyplot.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
WIDTHS = 9
"""Of 0 to 8 bits: the first colours of the heat map. Further ones:"""
EXACTLY, NOT_STORED = WIDTHS, WIDTHS + 1
NOT_STORED_CODECS = ("derived", "drawn")
SMALLEST_BYTES = 4096
"""Smaller sites are always kept exactly, and not drawn."""


def plot_accuracy(rows: Sequence[Row], path: Path) -> Path:
    """Metric against bytes held, a panel for each task, settings of one policy joined."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    columns = min(3, len(tasks))
    figure, panels = pyplot.subplots(
        -(-len(tasks) // columns),
        columns,
        figsize=(4.2 * columns, 3.4 * -(-len(tasks) // columns) + 0.6),
        layout="constrained",
        squeeze=False,
    )
    for axes, task in zip(panels.flat, tasks, strict=False):
        draw_task(axes, [row for row in rows if row.task == task and row.held_mb is not None])
    for axes in panels.flat[len(tasks) :]:
        axes.remove()
    labels = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    ordered = [name for name in POLICIES if name in labels]
    figure.legend(
        [labels[name] for name in ordered], ordered, loc="outside lower center",
        ncols=3 * columns,
        frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def draw_task(axes: Axes, rows: Sequence[Row]) -> None:
    """One panel: means with standard deviations over memory; a line where plain training is."""
    for policy in POLICIES:
        own = [row for row in rows if Setting.parse(row.setting).policy == policy]
        own.sort(key=lambda row: row.held_mb or 0)
        if not own:
            continue
        if policy == PLAIN:
            axes.axhline(own[0].mean, color=COLOURS[policy], linewidth=0.8, linestyle=":")
        axes.errorbar(
            [row.held_mb for row in own],  # type: ignore[arg-type]
            [row.mean for row in own],
            yerr=[row.sd or 0 for row in own],
            fmt="o-",
            markersize=5,
            capsize=3,
            color=COLOURS[policy],
            label=policy,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("MB held for backward")
    axes.set_ylabel(f"{rows[0].metric} x 100" if rows else "")
    axes.set_title(rows[0].task if rows else "", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def site_bits(runs: Sequence[Finished]) -> tuple[list[str], list[str], np.ndarray]:
    """What each site was stored with in its last step, by setting.

    Args:
        runs: of one task. The first of each setting counts; runs without a budget do not.

    Returns:
        Names of the sites, names of the settings, and a float64 array [sites, settings] of bits,
        `EXACTLY`, `NOT_STORED`, or NaN where a setting lacks the site.
    """
    first: dict[str, Finished] = {}
    for run in runs:
        if run.report is not None and run.setting.policy != EXACT:
            first.setdefault(run.setting.name, run)
    sites: dict[str, dict[str, float]] = {}
    for name, run in first.items():
        assert run.report is not None
        for site in run.report["sites"]:
            if site["plain_bytes"] >= SMALLEST_BYTES:
                key = f"{site['name']} {site['consumer']}"
                sites.setdefault(key, {})[name] = _level(site["codec"], site["bits"])
    levels = [[by_setting.get(name, np.nan) for name in first] for by_setting in sites.values()]
    return list(sites), list(first), np.array(levels, dtype=float).reshape(len(sites), len(first))


def _level(codec: str, bits: int | None) -> float:
    if codec in NOT_STORED_CODECS:
        return NOT_STORED
    return EXACTLY if bits is None else bits


def plot_bits(runs: Sequence[Finished], path: Path) -> list[Path]:
    """A heat map of bits, sites by settings; nothing where no run has a budget.

    Args:
        runs: of one task, see `site_bits`.
        path: where the picture goes.

    Returns:
        The pictures written: one or none.
    """
    sites, settings, levels = site_bits(runs)
    if not sites:
        return []
    colours = [*pyplot.get_cmap("viridis")(np.linspace(0, 1, WIDTHS)), "#b91c1c", "#d1d5db"]
    figure, axes = pyplot.subplots(
        figsize=(5 + 0.6 * len(settings), 1.6 + 0.13 * len(sites)), layout="constrained"
    )
    image = axes.imshow(
        levels,
        cmap=ListedColormap(colours),
        vmin=-0.5,
        vmax=NOT_STORED + 0.5,
        aspect="auto",
        interpolation="none",
    )
    prefix = _common_prefix([site.split(" ")[0] for site in sites])
    axes.set_yticks(range(len(sites)), [site[len(prefix) :] for site in sites], fontsize=5)
    axes.set_xticks(range(len(settings)), settings, rotation=45, ha="right", fontsize=8)
    axes.tick_params(length=0)
    axes.set_title(f"{runs[0].task}, seed {runs[0].seed}: bits of each site", fontsize=9)
    bar = figure.colorbar(image, ticks=range(NOT_STORED + 1), shrink=0.4, aspect=12)
    bar.ax.set_yticklabels([*map(str, range(WIDTHS)), "exact", "not stored"], fontsize=7)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return [path]


def _common_prefix(names: Sequence[str]) -> str:
    """The dotted prefix that all have in common."""
    shortest, longest = min(names), max(names)
    length = 0
    for position, (a, b) in enumerate(zip(shortest, longest, strict=False)):
        if a != b:
            break
        if a == ".":
            length = position + 1
    return shortest[:length]
