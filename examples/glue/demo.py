"""Train twice on generated sentences, plainly and under a memory budget, and compare.

    python examples/glue/demo.py

Needs no network: the model comes from a package, the data from `grammar`. Both runs are
`run_glue.py` with the same seed, each in a process of its own, so that the peak memory of one
says nothing about the other. Ends with exit status 1 if plain training learns too little for the
comparison to mean something, or if the budget costs too much accuracy.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grammar import write_dataset
from rich.console import Console
from rich.table import Table

SCRIPT = Path(__file__).with_name("run_glue.py")
TRAIN_SENTENCES = 4800
DEV_SENTENCES = 960
MIN_PLAIN_ACCURACY = 0.80
MAX_LOST_POINTS = 3.0

console = Console()


@dataclass(frozen=True)
class Run:
    """What one training run left in its folder."""

    results: dict[str, Any]
    losses: list[tuple[int, float]]
    report: dict[str, Any] | None

    @classmethod
    def load(cls, folder: Path) -> Run:
        history = _read_json(folder / "trainer_state.json")["log_history"]
        report = folder / "daf_report.json"
        return cls(
            results=_read_json(folder / "all_results.json"),
            losses=[(entry["step"], float(entry["loss"])) for entry in history if "loss" in entry],
            report=_read_json(report) if report.exists() else None,
        )

    @property
    def accuracy(self) -> float:
        return self.results["eval_accuracy"]

    @property
    def points(self) -> float:
        """The accuracy in percent, as it is shown."""
        return round(100 * self.accuracy, 1)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--budget_mb", type=float, default=16.0, help="for saved activations")
    parser.add_argument("--max_steps", type=int, default=130)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"))
    return parser.parse_args()


def train(options: argparse.Namespace, data: Path, name: str, *daf_options: str) -> Run:
    """Run the training script in a process of its own and return what it measured."""
    folder = options.output_dir / name
    command = [sys.executable, str(SCRIPT), *daf_options]
    settings = {
        "model_name_or_path": "minilm",
        "task_name": "sst2",
        "data_dir": data,
        "max_seq_length": 64,
        "per_device_train_batch_size": 64,
        "per_device_eval_batch_size": 64,
        "learning_rate": 2e-3,
        "max_steps": options.max_steps,
        "seed": options.seed,
        "logging_steps": 10,
        "save_strategy": "no",
        "output_dir": folder,
    }
    for option, value in settings.items():
        command += [f"--{option}", str(value)]
    command += ["--modules_to_save", "classifier", "pooler"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    # OpenMP's idle threads spin by default, which on a busy machine takes time from those at work.
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    status = subprocess.run(command, check=False, env=environment).returncode
    if status != 0:
        sys.exit(f"FAILED: the {name} run ended with exit status {status}")
    return Run.load(folder)


def compare(plain: Run, daf: Run) -> Table:
    """Set the two runs side by side."""
    assert daf.report is not None
    report = daf.report
    table = Table(title="MiniLM-L6 + LoRA on generated sentences", title_justify="left")
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("DAF", justify="right")
    table.add_row("accuracy", f"{plain.points:.1f}%", f"{daf.points:.1f}%")
    table.add_row(
        "activations held, at most", _mb(report["plain_bytes"]), _mb(report["held_bytes_peak"])
    )
    table.add_row("  budget", "-", _mb(report["budget_bytes"]))
    table.add_row("  ratio", "1", f"{report['ratio']:.1f}")
    table.add_row("  mean bits per value", "32", f"{report['mean_bits']:.2f}")
    for title, key, text in (
        ("peak memory above the model", "train_peak_rss_above_model_bytes", _mb),
        ("training time", "train_runtime", "{:.0f} s".format),
    ):
        table.add_row(title, text(plain.results[key]), text(daf.results[key]))
    return table


def _mb(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def plot(plain: Run, daf: Run, path: Path) -> None:
    """Draw memory held and training loss of both runs."""
    assert daf.report is not None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, colours = ("plain", "DAF"), ("#9aa5b1", "#2563eb")
    figure, (held_axes, peak_axes, loss_axes) = pyplot.subplots(
        1, 3, figsize=(10, 3.2), width_ratios=(1, 1, 2), layout="constrained"
    )
    bars = (
        (held_axes, "activations held", [daf.report["plain_bytes"], daf.report["held_bytes_peak"]]),
        (
            peak_axes,
            "peak above the model",
            [run.results["train_peak_rss_above_model_bytes"] for run in (plain, daf)],
        ),
    )
    for axes, title, values in bars:
        drawn = axes.bar(names, [value / 1e6 for value in values], color=colours, width=0.6)
        axes.bar_label(drawn, fmt="%.0f")
        axes.set_title(title, fontsize=10)
        axes.set_ylabel("MB")
        axes.margins(y=0.12)
    for name, colour, run in zip(names, colours, (plain, daf), strict=True):
        loss_axes.plot(*zip(*run.losses, strict=True), color=colour, linewidth=2)
        loss_axes.plot([], [], color=colour, label=f"{name}: {run.points:.1f}% accuracy")
    loss_axes.set_title("training loss", fontsize=10)
    loss_axes.set_xlabel("step")
    loss_axes.legend(frameon=False)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def verdict(plain: Run, daf: Run) -> tuple[bool, str]:
    """Say whether the comparison holds up, and how it came out."""
    if plain.accuracy < MIN_PLAIN_ACCURACY:
        return False, f"plain training reached only {plain.points:.1f}%: nothing to compare with"
    change = round(daf.points - plain.points, 1)
    if change < -MAX_LOST_POINTS:
        return False, f"the budget cost {-change:.1f} points of accuracy"
    assert daf.report is not None
    return True, (
        f"{daf.report['ratio']:.1f}x less activation memory, "
        f"{change:+.1f} points of accuracy against plain training"
    )


def main() -> int:
    options = parse_arguments()
    data = options.output_dir / "data"
    console.rule(f"Writing {TRAIN_SENTENCES} + {DEV_SENTENCES} sentences to {data}")
    write_dataset(data, TRAIN_SENTENCES, DEV_SENTENCES, options.seed)
    console.rule("1 of 2: plain training")
    plain = train(options, data, "plain", "--no_daf")
    console.rule(f"2 of 2: activations under a budget of {options.budget_mb:g} MB")
    daf = train(options, data, "daf", "--budget_mb", str(options.budget_mb))

    console.rule("Result")
    console.print(compare(plain, daf))
    if importlib.util.find_spec("matplotlib"):
        picture = options.output_dir / "demo.png"
        plot(plain, daf, picture)
        console.print(f"Picture: {picture}")
    good, summary = verdict(plain, daf)
    console.print(f"{'OK' if good else 'FAILED'}: {summary}", style="green" if good else "red")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
