"""The allocators: the hull, greedy against the optimum, uniform widths."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from daf_hf.allocation import Option, greedy, lower_hull, uniform
from daf_hf.codecs import GENERAL

sizes = st.integers(0, 40)
costs = st.integers(0, 100).map(float)


def option(nbytes, cost, bits=None):
    return Option(nbytes, cost, None if bits is None else GENERAL, bits)


points = st.lists(st.builds(option, sizes, costs), min_size=1, max_size=6)


def best_cost(sites, budget):
    """The least cost of any plan within the budget, by trying all of them."""
    plans = itertools.product(*sites)
    return min(
        (total_cost(p) for p in plans if total_bytes(p) <= budget),
        default=None,
    )


def total_cost(plan):
    return sum(o.cost for o in plan)


def total_bytes(plan):
    return sum(o.nbytes for o in plan)


@given(points)
def test_hull_is_a_convex_selection(options):
    hull = lower_hull(options)
    assert all(o in options for o in hull)
    steps = list(itertools.pairwise(hull))
    assert all(a.nbytes < b.nbytes and a.cost > b.cost for a, b in steps)
    slopes = [(a.cost - b.cost) / (b.nbytes - a.nbytes) for a, b in steps]
    assert slopes == sorted(slopes, reverse=True)
    assert len(set(slopes)) == len(slopes)


@given(points)
def test_no_option_lies_below_the_hull(options):
    hull = lower_hull(options)
    assert hull[0].nbytes == min(o.nbytes for o in options)
    assert hull[-1].cost == min(o.cost for o in options)
    for o in options:
        for a, b in itertools.pairwise(hull):
            if a.nbytes <= o.nbytes <= b.nbytes:
                share = (o.nbytes - a.nbytes) / (b.nbytes - a.nbytes)
                assert o.cost >= a.cost + share * (b.cost - a.cost) - 1e-9


@given(st.lists(points, min_size=1, max_size=4), st.integers(0, 120))
def test_greedy_is_within_one_edge_of_the_optimum(sites, budget):
    plan = greedy(sites, budget)
    assert len(plan) == len(sites)
    assert all(chosen in options for chosen, options in zip(plan, sites, strict=True))
    optimum = best_cost(sites, budget)
    if optimum is None:
        assert total_bytes(plan) == sum(min(o.nbytes for o in options) for options in sites)
        return
    assert total_bytes(plan) <= budget
    hulls = [lower_hull(options) for options in sites]
    edge = max(
        (a.cost - b.cost for hull in hulls for a, b in itertools.pairwise(hull)), default=0.0
    )
    assert optimum <= total_cost(plan) <= optimum + edge


@given(st.lists(points, min_size=1, max_size=4))
def test_greedy_with_room_for_all_takes_the_best(sites):
    assert total_cost(greedy(sites, math.inf)) == sum(min(o.cost for o in s) for s in sites)


@given(st.lists(points, min_size=1, max_size=4), st.integers(0, 100), st.integers(0, 50))
def test_greedy_takes_the_best_gain_per_byte_first(sites, budget, more):
    assume(best_cost(sites, budget) is not None)
    assert total_bytes(greedy(sites, budget + more)) <= budget + more


def test_greedy_prefers_where_bytes_buy_most():
    dear = [option(0, 100.0), option(10, 0.0)]
    cheap = [option(0, 10.0), option(10, 0.0)]
    assert [o.nbytes for o in greedy([cheap, dear], 10)] == [0, 10]


def test_greedy_passes_over_an_edge_that_does_not_fit():
    large = [option(0, 100.0), option(50, 0.0)]
    small = [option(0, 1.0), option(5, 0.0)]
    assert [o.nbytes for o in greedy([large, small], 10)] == [0, 5]


def test_greedy_without_sites():
    assert greedy([], 10) == []


def ladder(size, exact=True):
    """Options of 1 to 4 bits, and exact."""
    options = [option(size * bits, 2.0**-bits, bits) for bits in (1, 2, 3, 4)]
    return [*options, option(32 * size, 0.0)] if exact else options


@pytest.mark.parametrize(
    ("budget", "bits"), [(1000, None), (63, 4), (8, 4), (7, 3), (4, 2), (2, 1), (1, 1)]
)
def test_uniform_takes_the_widest_width_that_fits(budget, bits):
    assert [o.bits for o in uniform([ladder(1), ladder(1)], budget)] == [bits, bits]


def test_uniform_takes_the_nearest_lower_width_where_one_is_missing():
    sites = [ladder(1, exact=False), [option(1, 1.0, 1), option(3, 0.1, 3), option(32, 0.0)]]
    assert [o.bits for o in uniform(sites, 5)] == [2, 1]


def test_uniform_takes_the_best_codec_of_a_width():
    better = option(2, 0.1, 2)
    assert uniform([[option(1, 0.5, 2), better]], 2) == [better]


def test_uniform_without_sites():
    assert uniform([], 10) == []
