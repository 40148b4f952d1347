"""The multiple-choice knapsack: hulls, the greedy plan against the optimum, its core."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daf_hf import knapsack

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    """The benchmark, whose instances have a model's sizes."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("allocation")
    sys.path.remove(str(FOLDER))


def total(points, plan):
    return points[np.arange(len(plan)), plan].sum()


@pytest.mark.parametrize("seed", range(24))
def test_greedy_is_within_a_percent_of_the_optimum(benchmark, seed):
    rng = np.random.default_rng(seed)
    nbytes, costs = benchmark.instance(rng, int(rng.integers(40, 201)), alike=bool(seed % 2))
    for budget in benchmark.budgets(rng, nbytes):
        plan = knapsack.best_gain_first(nbytes, costs, budget)
        best = knapsack.exact(nbytes, costs, budget)
        assert total(nbytes, plan) <= budget and total(nbytes, best) <= budget
        assert total(costs, best) * (1 - 1e-5) <= total(costs, plan) <= 1.01 * total(costs, best)


rows_of_points = st.lists(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 100)), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


def arrays(rows):
    """Padded as allocation.py does."""
    width = max(map(len, rows))
    nbytes, costs = np.full((2, len(rows), width), np.inf)
    for index, row in enumerate(rows):
        nbytes[index, : len(row)], costs[index, : len(row)] = zip(*row, strict=True)
    return nbytes, costs


def least_cost(rows, budget):
    """By trying all plans; None when none fits."""
    plans = itertools.product(*rows)
    return min(
        (sum(c for _, c in p) for p in plans if sum(b for b, _ in p) <= budget), default=None
    )


@settings(deadline=None, max_examples=60)
@given(rows_of_points, st.integers(0, 160))
def test_exact_is_what_trying_all_plans_finds(rows, budget):
    nbytes, costs = arrays(rows)
    plan = knapsack.exact(nbytes, costs, budget)
    best = least_cost(rows, budget)
    if best is None:
        assert total(nbytes, plan) == nbytes.min(1).sum()
    else:
        assert total(nbytes, plan) <= budget
        assert total(costs, plan) == best


@settings(deadline=None)
@given(rows_of_points, st.integers(0, 160))
def test_the_search_of_the_core_finds_the_optimum_of_small_ones(rows, budget):
    """With fewer partial plans than are kept, it leaves no more than is close."""
    nbytes, costs = arrays(rows)
    best = least_cost(rows, budget)
    if best is not None:
        found = total(costs, knapsack.best_gain_first(nbytes, costs, budget))
        assert found <= best * (1 + knapsack.CLOSE) + 1e-9


def test_slopes_do_not_increase_along_a_hull(benchmark):
    nbytes, costs = benchmark.instance(np.random.default_rng(0), 100, alike=False)
    start, edges = knapsack.hulls(nbytes, costs)
    assert (nbytes[np.arange(100), start] == nbytes.min(1)).all()
    for row in range(100):
        mine = edges.take(np.flatnonzero(edges.rows == row))
        assert (np.diff(mine.slopes) <= 0).all()
        assert mine.points[-1] == 0  # exact


def test_exact_without_scipy_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"allocator='exact' needs scipy: pip install scipy"):
        knapsack.exact(np.ones((1, 1)), np.ones((1, 1)), 1.0)
