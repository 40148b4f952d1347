"""How fast are the CPU's encode and decode, next to a memcpy of the same tensor, and to others?

For every backend, codec, width, dtype and number of threads: the median time, and the bytes that
are read and written in a second as a fraction of what memcpy reaches with as many threads, timed
in turn with it. Beside them, at fewer choices, plain torch, compiled torch and bitsandbytes where
it is installed (``pip install 'daf-hf[bench]'``), and how fast dropout's noise is drawn.

    python benchmarks/kernels.py --json kernels.json
    python benchmarks/kernels.py --parts kernels --codecs group+normal gelu --bits 1 2 4 8
    python benchmarks/kernels.py --threads 1 --clock own
    DAF_HF_ISA=avx2 python benchmarks/kernels.py --parts noise
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from subjects import MAKERS, Subject, Subjects, Work
from timing import Clock, Memcpy, host_clock, keep_freed_memory, own_clock, samples

from daf_hf.codecs import parse_codec
from daf_hf.kernels import cpu_status

DIRECTIONS = ("encode", "decode", "draw")
DTYPES = ("float32", "bfloat16", "float16")
CODECS = [
    *(f"{unit}+{book}" for unit in ("group", "token", "channel")
      for book in ("uniform", "normal", "root")),
    "gelu",
    "binary",
]  # fmt: skip
PARTS = ("kernels", "peers", "noise")
WIDTH = 124
"""Columns of the tables."""

Row = dict[str, str | int | float]


class Record:
    """All times of one subject.

    Args:
        work: the subject, and what it is compared with.
    """

    def __init__(self, work: Work) -> None:
        self._subject, self._numel = work.subject, work.x.numel()
        self._moved = {direction: moved for direction, (_, moved) in work.calls.items()}
        self._copied = 2 * work.x.nbytes
        self._times: dict[str, list[float]] = {"copy": [], **{name: [] for name in work.calls}}

    def add(self, work: Work, copy: Memcpy, repeats: int, clock: Clock) -> None:
        """Time the subject and memcpy in turn."""
        calls = {direction: call for direction, (call, _) in work.calls.items()}
        for name, seconds in samples({"copy": copy, **calls}, repeats, clock).items():
            self._times[name] += seconds

    def rows(self) -> list[Row]:
        """One row for each direction: medians of all times."""
        seconds = {name: statistics.median(each) for name, each in self._times.items()}
        subject, rate = self._subject, self._copied / seconds["copy"]
        return [
            {
                "backend": subject.backend,
                "direction": direction,
                "granularity": subject.granularity,
                "codebook": subject.codebook,
                "bits": subject.bits,
                "dtype": subject.dtype,
                "threads": subject.threads,
                "ms": round(seconds[direction] * 1e3, 4),
                "ns_per_element": round(seconds[direction] * 1e9 / self._numel, 4),
                "memcpy_ms": round(seconds["copy"] * 1e3, 4),
                "fraction_of_memcpy": round(moved / seconds[direction] / rate, 4),
            }
            for direction, moved in self._moved.items()
        ]


def run(options: argparse.Namespace) -> list[Row]:
    """Time everything in some rounds, so that a busy minute is not that of some rows alone."""
    records: dict[Subject, Record] = {}
    subjects = Subjects(options)
    for index in range(options.rounds):
        print(f"round {index + 1} of {options.rounds}", file=sys.stderr)
        for work in subjects.each():
            record = records.setdefault(work.subject, Record(work))
            repeats = options.slow_repeats if work.slow else options.repeats
            with Memcpy(work.x, work.subject.threads) as copy:
                clock = own_clock if options.clock == "own" else host_clock
                record.add(work, copy, repeats, clock)
    return [row for record in records.values() for row in record.rows()]


def show(rows: list[Row], console: Console) -> None:
    """For each dtype and number of threads a table with a column for each width."""
    for dtype, threads in dict.fromkeys((row["dtype"], row["threads"]) for row in rows):
        some = [row for row in rows if (row["dtype"], row["threads"]) == (dtype, threads)]
        widths = sorted({row["bits"] for row in some})
        copy = statistics.median(float(row["memcpy_ms"]) for row in some)
        table = Table(
            title=f"{dtype}, threads: {threads}; ms, and fraction of memcpy ({copy:.2f} ms)",
            title_justify="left",
        )
        for column in ("", "backend", "codec"):
            table.add_column(column, no_wrap=True)
        for bits in widths:
            heading = f"{bits} bit{'' if bits == 1 else 's'}" if bits else ""
            table.add_column(heading, justify="right", no_wrap=True)
        lines: dict[tuple[str, str, str], dict] = {}
        for row in some:
            codec = str(row["codebook"])
            if codec not in ("gelu", "binary", "noise"):
                codec = f"{row['granularity']}+{codec}"
            line = str(row["direction"]), str(row["backend"]), codec
            ms = f"{row['ms']:.2f}" if float(row["ms"]) < 100 else f"{row['ms']:.0f}"
            cell = f"{ms} {row['fraction_of_memcpy']:4.0%}"
            lines.setdefault(line, {})[row["bits"]] = cell
        for line, cells in sorted(lines.items(), key=lambda item: DIRECTIONS.index(item[0][0])):
            table.add_row(*line, *(cells.get(bits, "") for bits in widths))
        console.print(table)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed of encode and decode next to memcpy.")
    available = ["cpu", "reference"] if cpu_status().available else ["reference"]
    threads = [1, 2] if (os.cpu_count() or 1) > 1 else [1]
    add = parser.add_argument
    add("--rows", type=int, default=4096, help="rows of the tensor")
    add("--cols", type=int, default=3072, help="its columns")
    add("--parts", nargs="+", default=PARTS, choices=PARTS, help="what to measure")
    add("--backends", nargs="+", default=available, choices=("cpu", "reference"))
    add("--peers", nargs="+", default=list(MAKERS), choices=MAKERS)
    add("--codecs", nargs="+", default=CODECS, help="codecs by name")
    add("--bits", nargs="+", type=int, default=[1, 2, 3, 4, 8], help="widths, 1 to 8")
    add("--dtypes", nargs="+", default=DTYPES[:2], choices=DTYPES)
    add("--threads", nargs="+", type=int, default=threads, help="numbers of threads")
    add("--rounds", type=int, default=3, help="how often all is gone through")
    add("--repeats", type=int, default=7, help="timed calls of each native kernel in a round")
    add("--slow-repeats", type=int, default=2, help="timed calls of everything else in a round")
    add(
        "--clock",
        choices=("wall", "own"),
        default="wall",
        help="own: the calling thread's time on its processor, for a machine with others' work on "
        "it; for one thread",
    )
    add("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(arguments)
    for text in options.codecs:
        try:
            parse_codec(text)
        except ValueError as error:
            parser.error(f"--codecs: {error}")
    for name in ("bits", "threads", "rows", "cols", "rounds", "repeats", "slow_repeats"):
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: use 1 or more")
    if options.clock == "own" and options.threads != [1]:
        parser.error(f"--clock own --threads {options.threads}: use --threads 1")
    if max(options.bits) > 8:
        parser.error(f"--bits {options.bits}: use widths of 1 to 8")
    if options.rows * options.cols % 256:
        parser.error(
            f"--rows {options.rows} --cols {options.cols}: the product must be a multiple of 256, "
            "which is what the peers take"
        )
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    keep_freed_memory()
    rows = run(options)
    console = Console(width=WIDTH, highlight=False)
    native = f"native backend: {cpu_status().isa or 'not built'}"
    console.print(f"{options.rows} x {options.cols}; {native}; torch {torch.__version__}")
    show(rows, console)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
