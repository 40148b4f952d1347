"""Plans within bytes and seconds, against the best there are."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

from daf_hf.allocation import Option, greedy, points
from daf_hf.codecs import GENERAL
from daf_hf.time_price import allocate_in_time

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    """The benchmark, whose instances have a model's sizes."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("allocation")
    sys.path.remove(str(FOLDER))


def option(nbytes, cost, seconds):
    return Option(nbytes, float(cost), GENERAL, 2, seconds=float(seconds))


def totals(plan):
    """Bytes, cost and seconds."""
    return tuple(sum(getattr(o, name) for o in plan) for name in ("nbytes", "cost", "seconds"))


def is_one_each(plan, sites):
    return all(any(o is one for o in options) for one, options in zip(plan, sites, strict=True))


some_sites = st.lists(
    st.lists(
        st.builds(option, st.integers(0, 40), st.integers(0, 100), st.integers(0, 20)),
        min_size=1,
        max_size=5,
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(some_sites, st.integers(0, 120), st.integers(0, 60))
def test_bytes_come_first_and_seconds_second(sites, budget, limit):
    plan, least = allocate_in_time("greedy", sites, budget, limit)
    assert is_one_each(plan, sites)
    nbytes, cost, seconds = totals(plan)
    within = [totals(p) for p in itertools.product(*sites) if totals(p)[0] <= budget]
    if not within:
        assert nbytes == sum(min(o.nbytes for o in options) for options in sites)
        return
    assert nbytes <= budget
    if least is None:
        assert seconds <= limit
        assert cost >= min(c for _, c, s in within if s <= limit)
    else:
        assert limit < least and min(s for _, _, s in within) <= least
        assert cost == totals(greedy(sites, budget))[1]


def instance(benchmark, seed, rows):
    """Sites like a model's; encoded options take time by elements and width, exact ones none."""
    rng = np.random.default_rng(seed)
    nbytes, costs = benchmark.instance(rng, rows, alike=bool(seed % 2))
    seconds = nbytes[:, :1] * rng.uniform(1.0, 2.0, nbytes.shape) * 1e-10
    seconds[:, 0] = 0.0
    sites = [
        [
            Option(int(b), float(c), GENERAL, 2, seconds=float(s))
            for b, c, s in zip(*row, strict=True)
        ]
        for row in zip(nbytes, costs, seconds, strict=True)
    ]
    return sites, seconds


def least_cost(sites, seconds, budget, limit, about):
    """The least cost within both, by integer programming; ``about``: its order of magnitude."""
    nbytes, costs = points(sites)
    rows, width = nbytes.shape
    one_each = np.kron(np.eye(rows), np.ones(width))
    unit = np.array([[budget], [limit]])
    both = np.stack([nbytes.ravel(), seconds.ravel()]) / unit * 1e3
    found = milp(
        costs.ravel() / about,  # the solver's tolerances are absolute
        integrality=np.ones(rows * width),
        bounds=(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(both, -np.inf, 1e3)],
        options={"mip_rel_gap": 1e-3},
    )
    return found.fun * about


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_cost_is_close_to_the_optimum(benchmark, share):
    """Sites are few and large: what neither limit has room for is a part of the gap."""
    gaps = []
    for seed in range(5):
        sites, seconds = instance(benchmark, seed, 40)
        budget = 0.4 * sum(options[0].nbytes for options in sites)
        free = totals(greedy(sites, budget))
        fastest = allocate_in_time("greedy", sites, budget, 0.0)[1]
        limit = fastest + share * (free[2] - fastest)
        plan, least = allocate_in_time("greedy", sites, budget, limit)
        nbytes, cost, taken = totals(plan)
        assert least is None and nbytes <= budget and taken <= limit
        assert cost >= free[1]
        gaps.append(cost / least_cost(sites, seconds, budget, limit, cost) - 1)
    assert min(gaps) > -1e-3 and max(gaps) < 0.15 and sum(gaps) / len(gaps) < 0.05


def test_what_matters_most_a_byte_and_a_second_stays_exact():
    slow = [option(10, 0, 0), option(2, 5, 4)]
    fast = [option(10, 0, 0), option(2, 5, 1)]
    free, _ = allocate_in_time("greedy", [fast, slow], 12, math.inf)
    plan, least = allocate_in_time("greedy", [fast, slow], 12, 2)
    assert totals(free)[1] == totals(plan)[1] == 5 and least is None
    assert [o.nbytes for o in plan] == [2, 10]


def test_the_allocator_is_asked_for_the_plan(benchmark):
    sites, _ = instance(benchmark, 3, 20)
    budget = 0.4 * sum(options[0].nbytes for options in sites)
    limit = 0.9 * totals(greedy(sites, budget))[2]
    best, fair = (allocate_in_time(name, sites, budget, limit) for name in ("exact", "greedy"))
    assert best[1] is None and totals(best[0])[2] <= limit
    assert totals(best[0])[1] <= 1.02 * totals(fair[0])[1]

    def stubborn(sites, budget):
        return [min(options, key=lambda o: o.nbytes) for options in sites]

    plan, least = allocate_in_time(stubborn, sites, budget, limit)
    assert plan == stubborn(sites, budget) and least is not None


def test_no_sites_and_no_limit():
    assert allocate_in_time("greedy", [], 10, 0.0) == ([], None)
    assert allocate_in_time("greedy", [[option(5, 1, 9)]], 10, math.inf)[1] is None


def test_a_plan_for_many_sites_takes_no_time_to_speak_of(benchmark):
    """A plan is made once for each shape of the inputs."""
    sites, _ = instance(benchmark, 1, 1000)
    budget = 0.3 * sum(options[0].nbytes for options in sites)
    limit = 0.8 * totals(greedy(sites, budget))[2]
    began = time.process_time()
    assert allocate_in_time("greedy", sites, budget, limit)[1] is None
    assert time.process_time() - began < 2.0
