r"""What does a budget cost in accuracy, and what would simpler policies cost at theirs?

Trains every task with every seed under every setting with `examples/glue/run_glue.py`, and makes
one table and pictures of what the runs left.

    python benchmarks/accuracy.py --data_dir path/to/glue --tasks sst2 mrpc --seeds 1 2 3 \
        --settings plain uniform4 daf@20 daf@30

A setting is a policy, with ``@RATIO`` for its budget: what plain training holds for backward in
its worst step, over that ratio. The bytes are those of the same task, seed and steps, counted by a
run that keeps everything exactly (the setting ``exact``, which is added where a budget needs it).
``NAME`` alone takes the policy's own ratio, see `accuracy_settings.py`.

Every run has a process of its own, so that its peak memory is its own. It leaves its folder
``OUT/TASK/SETTING/SEED`` with `run_glue.py`'s files, ``run.json`` and ``log.txt``. A run that is
finished is not repeated: after an interruption the same command goes on. A run that fails, such as
one whose budget is too small, is listed below the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accuracy_plots import plot_accuracy, plot_bits
from accuracy_report import (
    build_rows,
    markdown,
    read_json,
    read_results,
    read_runs,
    terminal_tables,
    to_json,
)
from accuracy_settings import EXACT, PLAIN, SCORES, Setting
from rich.console import Console

from daf_hf import DAFConfig

SCRIPT = Path(__file__).parents[1] / "examples" / "glue" / "run_glue.py"
TASKS = ("sst2", "mrpc", "stsb", "rte", "cola")
SETTINGS = (
    PLAIN, "fixed8", "uniform4", "uniform2", "actnn@20", "gact@20", "daf@20", "daf@30",
)  # fmt: skip
PACKAGED_MODEL = "minilm"
STEPS, SHORT_STEPS = 300, 20

console = Console(highlight=False)


class RunError(RuntimeError):
    """A run that cannot be made, or whose folder holds another one."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        options: of `run_glue.py`, besides those that follow from the other attributes.
        out: the folder of all runs.
    """

    task: str
    setting: Setting
    seed: int
    options: dict[str, Any]
    out: Path

    @property
    def folder(self) -> Path:
        return self.out / self.task / self.setting.name / str(self.seed)

    @property
    def title(self) -> str:
        return f"{self.task} {self.setting.name} seed {self.seed}"

    def plain_bytes(self) -> float | None:
        """What plain training holds in the worst of the same steps, where that is needed.

        Raises:
            RunError: when the run that counts them is not finished.
        """
        if self.setting.ratio is None:
            return None
        counting = replace(self, setting=Setting.parse(EXACT))
        if not counting.is_made():
            raise RunError(f"its budget is a part of what {counting.title} counts: not finished")
        return read_json(counting.folder / "daf_report.json")["plain_bytes"]

    def is_made(self) -> bool:
        """Whether its folder holds it, finished.

        Raises:
            RunError: when the folder holds another run.
        """
        if read_results(self.folder, self.task) is None:
            return False
        path = self.folder / "run.json"
        if not path.exists() or read_json(path) != self.record():
            raise RunError(f"{self.folder} holds a run with other options; use another --out")
        return True

    def record(self) -> dict[str, Any]:
        """What makes this run what it is: ``run.json``."""
        return {
            "task": self.task,
            "setting": self.setting.name,
            "seed": self.seed,
            "options": self.options,
            "daf": self.setting.daf_options(self.plain_bytes()),
        }

    def command(self, data_dir: Path | None) -> list[str]:
        """The command line."""
        options = {
            "task_name": self.task,
            **({"data_dir": data_dir} if data_dir else {}),
            **self.options,
            "seed": self.seed,
            "save_strategy": "no",
            "disable_tqdm": True,
            "output_dir": self.folder,
        }
        if self.setting.policy == PLAIN:
            options["no_daf"] = True
        else:
            options["daf_config"] = self.folder / "daf.json"
        command = [sys.executable, str(SCRIPT)]
        for name, value in options.items():
            command += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return command


def make(run: Run, data_dir: Path | None) -> str:
    """Make a run unless its folder holds it already; says what became of it.

    Raises:
        RunError: when it fails, or the folder holds a run with other options.
    """
    if run.is_made():
        return "was there"
    record = run.record()
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "all_results.json").unlink(missing_ok=True)
    (run.folder / "run.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    if record["daf"] is not None:
        (run.folder / "daf.json").write_text(json.dumps(record["daf"]), encoding="utf-8")
    # OpenMP's idle threads spin by default, which on a busy machine takes time from those at work.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    if data_dir is not None and run.options["model_name_or_path"] == PACKAGED_MODEL:
        environment["HF_HUB_OFFLINE"] = "1"  # all is here
    start = time.monotonic()
    with (run.folder / "log.txt").open("w", encoding="utf-8") as log:
        status = subprocess.run(
            run.command(data_dir),
            check=False,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        ).returncode
    if status != 0 or read_results(run.folder, run.task) is None:
        raise RunError(f"exit status {status}; see {run.folder / 'log.txt'}")
    return f"{time.monotonic() - start:.0f} s"


def make_all(runs: Iterable[Run], data_dir: Path | None, jobs: int) -> int:
    """Make runs, ``jobs`` at a time, and go on where one fails; how many did."""

    def attempt(run: Run) -> tuple[Run, str, bool]:
        try:
            return run, make(run, data_dir), True
        except RunError as error:
            return run, f"FAILED: {error}", False

    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        # When this is interrupted, map() cancels what has not begun.
        for run, outcome, good in pool.map(attempt, list(runs)):
            console.print(f"{run.title}: {outcome}", style=None if good else "red", soft_wrap=True)
            failed += not good
    return failed


def waves(options: argparse.Namespace) -> list[list[Run]]:
    """The runs in the order they are made: seed by seed, the runs that count bytes first."""
    settings = list(options.settings)
    if any(setting.ratio is not None for setting in settings):
        settings.append(Setting.parse(EXACT))
    settings = sorted(set(settings), key=lambda setting: setting.order)
    ordered = []
    for seed in options.seeds:
        of_seed = [
            Run(task, setting, seed, options.run_options, options.out)
            for task in options.tasks
            for setting in settings
        ]
        ordered.append([run for run in of_seed if run.setting.policy == EXACT])
        ordered.append([run for run in of_seed if run.setting.policy != EXACT])
    return ordered


def report(out: Path) -> int:
    """Write table and pictures of what is there; the number of runs in them."""
    runs, unfinished = read_runs(out)
    if not runs:
        console.print(f"{out}: no finished run", style="red")
        return 0
    rows = build_rows(runs)
    to_json(rows, out / "accuracy.json")
    (out / "accuracy.md").write_text(markdown(rows, unfinished), encoding="utf-8")
    for table in terminal_tables(rows):
        console.print(table)
    for name in unfinished:
        console.print(f"Not finished: {name}", soft_wrap=True)
    pictures = [plot_accuracy(rows, out / "accuracy.png")]
    for task in dict.fromkeys(row.task for row in rows):
        pictures += plot_bits([run for run in runs if run.task == task], out / f"bits-{task}.png")
    console.print(f"Table: {out / 'accuracy.md'}; pictures: {', '.join(map(str, pictures))}")
    return len(runs)


def parse_setting(text: str) -> Setting:
    """A setting whose options daf_hf accepts."""
    try:
        setting = Setting.parse(text)
        config = setting.daf_options(plain_bytes=1e9)
        if config is not None:
            DAFConfig.from_dict(config)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return setting


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    add = parser.add_argument
    add("--tasks", nargs="+", choices=SCORES, default=list(TASKS), metavar="TASK")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="SEED")
    add(
        "--settings",
        nargs="+",
        type=parse_setting,
        metavar="SETTING",
        help=f"POLICY or POLICY@RATIO; default: {' '.join(SETTINGS)}",
    )
    add("--data_dir", type=Path, help="GLUE's original files; else the Hub")
    add("--model", default=PACKAGED_MODEL, help="a folder, a name on the Hub, or minilm")
    add("--modules_to_save", nargs="+", default=["classifier", "pooler"], help="trained in full")
    add("--max_seq_length", type=int, default=64)
    add("--batch_size", type=int, default=32)
    add("--learning_rate", type=float, default=1e-3)
    add("--max_steps", type=int, help=f"default: {STEPS}")
    add("--out", type=Path, help="default: outputs/accuracy")
    add("--jobs", type=int, default=1, help="runs at a time; above 1 spoils times")
    add(
        "--short",
        action="store_true",
        help=f"one task, one seed, {SHORT_STEPS} steps, in outputs/accuracy-short: a trial in "
        "minutes, which says nothing of accuracy",
    )
    add("--report_only", action="store_true", help="train nothing")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.max_steps is None:
        options.max_steps = SHORT_STEPS if options.short else STEPS
    for name in ("jobs", "max_steps", "max_seq_length", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: use 1 or more")
    if options.short:
        options.tasks, options.seeds = options.tasks[:1], options.seeds[:1]
    options.out = options.out or Path(f"outputs/accuracy{'-short' if options.short else ''}")
    if options.settings is None:
        options.settings = [Setting.parse(text) for text in SETTINGS]
    options.run_options = {
        "model_name_or_path": options.model,
        "modules_to_save": options.modules_to_save,
        "max_seq_length": options.max_seq_length,
        "per_device_train_batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "max_steps": options.max_steps,
    }
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    failed = 0
    if not options.report_only:
        for wave in waves(options):
            failed += make_all(wave, options.data_dir, options.jobs)
    return 0 if report(options.out) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
