"""How far from the optimum is the greedy allocator, and how long do both take?

On random instances with a model's sizes: the largest and mean excess of the cost over that of
``exact``, and the times of both a plan; and ``greedy`` alone for many sites.

    python benchmarks/allocation.py
    python benchmarks/allocation.py --instances 30
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from daf_hf.allocation import Option, exact, greedy
from daf_hf.codecs import GENERAL

GAUSSIAN = (1.0, 0.36, 0.12, 0.036, 0.010, 0.003, 0.0009, 0.00025, 0.00007)
"""Distortions at 0 to 8 bits."""

LAYERS = (32 * 128 * 768, 32 * 12 * 128 * 128, 32 * 128 * 3072, 32 * 128 * 8, 32 * 128)
"""Elements of what roberta-base saves of a batch of 32 x 128."""

Arrays = tuple[NDArray[np.float64], NDArray[np.float64]]


def instance(rng: np.random.Generator, rows: int, alike: bool) -> Arrays:
    """Bytes and costs ``[rows, 13]`` of sites like a model's; the first option is exact.

    Args:
        rng: of sizes, importances and distortions.
        rows: sites.
        alike: whether their sizes are a few, as a model's are, or all different.
    """
    if alike:
        numel = rng.choice(LAYERS, rows, p=[0.45, 0.15, 0.15, 0.2, 0.05])
    else:
        numel = (10 ** rng.uniform(4, 7.2, rows)).astype(int)
    importance = 10 ** rng.normal(-2, 1, rows) * 10 ** rng.uniform(-0.3, 0.3, rows)
    nbytes, costs = [4 * numel], [np.zeros(rows)]
    widths = [*itertools.product((0, 1, 2, 3), (256, 768)), (4, 256), (5, 256), (6, 256), (8, 256)]
    for bits, cols in widths:
        statistics = (4 if bits <= 4 else 8) * (numel // cols)
        nbytes.append(4100 * (-(-numel * bits // 32768) - (-statistics // 4096)))
        distortion = GAUSSIAN[bits] * rng.uniform(0.8, 1.25, rows) * (1.3 if cols == 768 else 1)
        costs.append(importance * distortion * (rng.uniform(0.5, 2, rows) if bits == 0 else 1))
    return np.array(nbytes, float).T, np.array(costs).T


def budgets(rng: np.random.Generator, nbytes: NDArray[np.float64]) -> list[float]:
    """Anywhere, near the least, and near what keeps everything exactly."""
    shares = (rng.uniform(), 10 ** rng.uniform(-3, 0), 1 - 10 ** rng.uniform(-3, -1))
    least, full = nbytes.min(1).sum(), nbytes[:, 0].sum()
    return [float(least + share * (full - least)) for share in shares]


def options(nbytes: NDArray[np.float64], costs: NDArray[np.float64]) -> list[list[Option]]:
    return [
        [Option(int(b), float(c), GENERAL, None) for b, c in zip(*row, strict=True)]
        for row in zip(nbytes, costs, strict=True)
    ]


def timed(allocator: Callable[..., list[Option]], *arguments: Any) -> tuple[float, float]:
    """A plan's cost, and the seconds that it took."""
    began = time.perf_counter()
    plan = allocator(*arguments)
    return sum(option.cost for option in plan), time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", type=int, default=750)
    parser.add_argument("--sites", type=int, default=1000, help="of greedy alone")
    parser.add_argument("--options", type=int, default=12, help="a site, of greedy alone")
    args = parser.parse_args()

    rows = []
    for seed in range(-(-args.instances // 3)):
        rng = np.random.default_rng(seed)
        points = instance(rng, int(rng.integers(40, 201)), alike=bool(seed % 2))
        for budget in budgets(rng, points[0]):
            (cost, seconds), (least, longer) = (
                timed(allocator, options(*points), budget) for allocator in (greedy, exact)
            )
            rows.append((cost / least - 1, seconds, longer))
    excess, short, long = np.array(rows).T
    table = Table("", "excess", "greedy", "exact", title=f"{len(rows)} plans for 40 to 200 sites")
    for name, of in (("median", np.median), ("mean", np.mean), ("most", np.max)):
        times = f"{1e3 * of(short):.1f} ms", f"{1e3 * of(long):.0f} ms"
        table.add_row(name, f"{100 * of(excess):.2f} %", *times)
    rng = np.random.default_rng(0)
    nbytes, costs = instance(rng, args.sites, alike=True)
    many = options(nbytes[:, : args.options], costs[:, : args.options])
    each = [min(timed(greedy, many, b)[1] for _ in range(9)) for b in budgets(rng, nbytes)]
    console = Console()
    console.print(table)
    console.print(f"greedy, {args.sites} sites of {len(many[0])} options: {1e3 * max(each):.1f} ms")


if __name__ == "__main__":
    main()
