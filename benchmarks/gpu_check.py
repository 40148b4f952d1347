"""One command for a machine with an NVIDIA GPU: is everything right there, and how fast is it?

    python benchmarks/gpu_check.py --json gpu.json

At most 8 minutes, no network. Each section runs in a process of its own, so that a kernel that
crashes or hangs fails its section alone; what it found until then is shown. Sections: the
environment; each backend against the reference, bit for bit; their speed against a copy on the
device; what hooks cost beyond kernels; a LoRA step of roberta-base plain, under a budget, and with
gradient checkpointing. The exit status is 1 if any section failed.

``--device cpu`` runs the same with tiny sizes on a CPU, to try the script itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from check_kernels import Machine, Row, bandwidth, conformance, environment
from check_training import hooks, training_step
from rich.console import Console
from rich.table import Table

from daf_hf.kernels import CANDIDATES

SECTIONS = {
    "environment": environment,
    "conformance": conformance,
    "bandwidth": bandwidth,
    "hooks": hooks,
    "step": training_step,
}
LIMITS = {"environment": 60, "conformance": 150, "bandwidth": 80, "hooks": 90, "step": 220}
"""Seconds that a process may take: most of them Triton's, which compiles for its first calls."""

TOTAL_LIMIT = 470.0
"""Seconds that all may take together."""

BY_BACKEND = ("conformance", "bandwidth")
ERROR_LINES = 3
"""Last lines of a process's errors that are shown."""

WIDTH = 112
LONG = 20
"""Characters from which a cell may be wrapped."""


@dataclass
class Outcome:
    """What came of a section, for one backend where it takes one.

    Attributes:
        section, backend: what was run.
        seconds: how long it took.
        rows: the lines of its table.
        failures: what is wrong; empty where nothing is.
    """

    section: str
    backend: str
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def run(section: str, backend: str, options: argparse.Namespace, left: float) -> Outcome:
    """Run a section in a process of its own, for at most ``left`` seconds."""
    outcome, start = Outcome(section, backend), time.perf_counter()
    limit = max(1, round(min(options.limit or LIMITS[section], left)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        path.touch()
        command = [sys.executable, __file__, "--device", options.device, "--size", options.size]
        command += ["--child", section, backend, str(path)]
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, encoding="utf-8", timeout=limit)
            if done.returncode:
                last = done.stderr.strip().splitlines()[-ERROR_LINES:]
                outcome.failures.append(f"exit status {done.returncode}: " + " / ".join(last))
        except subprocess.TimeoutExpired:
            outcome.failures.append(f"not done after {limit} s: the rows until then are shown")
        lines = path.read_text(encoding="utf-8").splitlines()
    outcome.rows = [json.loads(line) for line in lines]
    outcome.failures += [row.pop("failed") for row in outcome.rows if "failed" in row]
    outcome.seconds = round(time.perf_counter() - start, 1)
    return outcome


def child(section: str, backend: str, path: str, options: argparse.Namespace) -> None:
    """Run a section in this process, and write each row as soon as it is there."""
    device, tiny = torch.device(options.device), options.size == "tiny"
    if tiny:
        torch.set_num_threads(1)  # where there is little to do, others only cost time
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    with open(path, "a", encoding="utf-8") as file:
        for row in SECTIONS[section](Machine(device, tiny), backend):
            file.write(json.dumps(row) + "\n")
            file.flush()


def show(section: str, outcomes: list[Outcome], console: Console) -> None:
    """One table for a section, and what failed."""
    seconds = sum(outcome.seconds for outcome in outcomes)
    table = Table(title=f"{section} ({seconds:.0f} s)", title_justify="left")
    rows = [row for outcome in outcomes for row in outcome.rows]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        short = all(len(str(row.get(name, ""))) < LONG for row in rows)
        table.add_column(name.replace("_", " "), overflow="fold", no_wrap=short)
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in columns))
    console.print(table)
    for outcome in outcomes:
        for failure in outcome.failures:
            console.print(f"FAILED: {section} {outcome.backend}: {failure}", soft_wrap=True)


def check_all(options: argparse.Namespace, console: Console) -> list[Outcome]:
    """Run and show the sections that the options name."""
    found = []
    end = time.perf_counter() + TOTAL_LIMIT
    kind = torch.device(options.device).type
    for section in options.sections:
        backends = CANDIDATES[kind] if section in BY_BACKEND else ("",)
        outcomes = [run(section, name, options, end - time.perf_counter()) for name in backends]
        served = [o for o in outcomes if any(row.get("check") == "self-check" for row in o.rows)]
        if section == "conformance" and not served and not any(o.failures for o in outcomes):
            names = " nor ".join(backends)
            outcomes[0].failures.append(f"neither {names} serves here, so that nothing was checked")
        show(section, outcomes, console)
        found += outcomes
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Whether daf_hf works on this GPU, and how fast.")
    add = parser.add_argument
    add("--device", default="cuda", help="such as cuda:1; cpu, to try the script itself")
    add("--size", choices=("full", "tiny"), help="of tensors and models; on a CPU tiny")
    add("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    add("--limit", type=float, help="seconds for each process, in place of its own limit")
    add("--json", type=Path, help="also write all rows to this file")
    add("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        kind = torch.device(options.device).type
    except RuntimeError:
        kind = ""
    if kind not in CANDIDATES:
        parser.error(f"--device {options.device}: use cpu, cuda, or cuda:INDEX")
    if kind == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"--device {options.device}: torch {torch.__version__} finds no CUDA device; "
            "--device cpu tries the script itself"
        )
    options.size = options.size or ("full" if kind == "cuda" else "tiny")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs the check; the exit status."""
    options = parse(arguments)
    if options.child:
        child(*options.child, options)
        return 0
    start = time.perf_counter()
    console = Console(width=max(WIDTH, Console().width), highlight=False, markup=False)
    found = check_all(options, console)
    failed = sum(bool(outcome.failures) for outcome in found)
    console.print(f"{len(found) - failed} passed, {failed} failed, "
                  f"{time.perf_counter() - start:.0f} s")  # fmt: skip
    if options.json:
        text = json.dumps([asdict(outcome) for outcome in found], indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
