"""The allocators: the hull, greedy against the optimum, uniform widths, published rules."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import batch, build, compressed, gradients

from daf_hf import DAFConfig, allocation, register_allocator
from daf_hf.allocation import (
    Option,
    actnn,
    allocate,
    exact,
    fixed8,
    gact,
    greedy,
    lower_hull,
    resolve_allocator,
    uniform,
)
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


# --- all of them -------------------------------------------------------------------------------

ALL = ["greedy", "uniform", "fixed8", "actnn", "gact", "exact"]


@st.composite
def site_options(draw):
    """What a site like the planner's offers: widths, exact, more bytes for less cost."""
    size, importance = draw(st.integers(1, 50)), draw(st.integers(1, 100))
    widths = draw(st.sets(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8]), min_size=1))
    options = [
        Option(size * bits + 2, importance * 3.0**-bits, GENERAL, bits, (), float(importance))
        for bits in sorted(widths)
    ]
    return [*options, Option(32 * size, 0.0, None, None, (), float(importance))]


many_sites = st.lists(site_options(), min_size=1, max_size=8)


@settings(deadline=None)
@given(many_sites, st.integers(0, 4000), st.sampled_from(["greedy", "actnn", "gact", "exact"]))
def test_the_budget_is_respected_if_it_can_be(sites, budget, name):
    plan = allocate(name, sites, budget)
    least = sum(min(o.nbytes for o in options) for options in sites)
    assert total_bytes(plan) <= max(budget, least)


@settings(deadline=None)
@given(many_sites, st.integers(0, 4000))
def test_exact_is_never_worse_than_any_other(sites, budget):
    assume(total_bytes(min(options, key=lambda o: o.nbytes) for options in sites) <= budget)
    best = total_cost(exact(sites, budget))
    for other in (greedy, uniform, actnn, gact):
        plan = other(sites, budget)
        assert best <= total_cost(plan) * (1 + 1e-5) or total_bytes(plan) > budget


@settings(deadline=None)
@given(many_sites, st.integers(0, 4000))
def test_greedy_is_never_worse_than_uniform(sites, budget):
    plan = uniform(sites, budget)
    assume(total_bytes(plan) <= budget)
    assert total_cost(greedy(sites, budget)) <= total_cost(plan) * 1.005


@settings(deadline=None)
@given(many_sites, st.integers(0, 3000), st.integers(0, 1000))
def test_more_bytes_never_cost_more(sites, budget, more):
    assume(total_bytes(min(options, key=lambda o: o.nbytes) for options in sites) <= budget)
    for allocator in (exact, uniform):
        richer, poorer = allocator(sites, budget + more), allocator(sites, budget)
        assert total_cost(richer) <= total_cost(poorer) * (1 + 1e-5)
    for allocator in (actnn, gact):  # one sequence of steps, of which a larger budget takes fewer
        richer, poorer = allocator(sites, budget + more), allocator(sites, budget)
        assert all(a.nbytes >= b.nbytes for a, b in zip(richer, poorer, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_no_sites_no_plan(name):
    assert allocate(name, [], 10) == []


@pytest.mark.parametrize("name", ALL)
def test_every_allocator_trains_within_the_budget(name):
    model, inputs = build("bert"), batch("bert")
    daf, compressor = compressed(model, 0.15, allocator=name)
    found = gradients(model, inputs, daf)
    assert found and all(bool(g.isfinite().all()) for g in found.values())
    assert 0 < compressor.ledger.peak.held <= 1.5e5
    assert compressor.arena.demotions > 0 or name != "fixed8"


# --- fixed8 and the published rules ------------------------------------------------------------


def rungs(size, importance=1.0, widths=(0, 1, 2, 3, 4, 5, 6, 7, 8)):
    options = [Option(size * bits, 1.0, GENERAL, bits, (), importance) for bits in widths]
    return [*options, Option(32 * size, 0.0, None, None, (), importance)]


def test_fixed8_takes_no_notice_of_the_budget():
    sites = [rungs(1), rungs(5, widths=(2, 4))]
    assert [o.bits for o in fixed8(sites, 0)] == [o.bits for o in fixed8(sites, 1e9)] == [8, 4]


@pytest.mark.parametrize(
    ("allocator", "error"),
    [(actnn, lambda bits: (2**bits - 1) ** -2), (gact, lambda bits: 4**-bits)],
)
def test_published_rules_equalise_what_a_byte_buys(allocator, error):
    """No single exchange of a bit betters the model's own objective: it is convex in the width."""
    sites = [rungs(10, w, widths=range(1, 9)) for w in (1.0, 30.0, 1e3, 2e5)]
    bits = [o.bits for o in allocator(sites, 10 * 16)]
    assert sum(bits) == 16 and bits == sorted(bits)
    weights = [1.0, 30.0, 1e3, 2e5]

    def objective(widths):
        return sum(w * error(b) for w, b in zip(weights, widths, strict=True))

    every = itertools.product(range(1, 9), repeat=4)
    assert objective(bits) == min(objective(b) for b in every if sum(b) == 16)


def test_published_rules_ignore_measured_costs():
    dear = [Option(o.nbytes, 9.0, o.codec, o.bits) for o in rungs(1)]
    for allocator in (actnn, gact):
        plan = allocator([rungs(1), dear], 8)
        assert [o.bits for o in plan] == [4, 4]


def test_actnn_goes_to_0_bits_only_when_all_have_1():
    sites = [rungs(1, 1e-9), rungs(1, 1.0)]
    assert [o.bits for o in actnn(sites, 2)] == [1, 1]
    assert [o.bits for o in actnn(sites, 1)] == [0, 1]
    assert [o.bits for o in gact(sites, 2)] == [0, 2]


# --- how they are named ------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    """Registrations that end with the test."""
    allocators = allocation.ALLOCATORS
    monkeypatch.setattr(allocators, "_objects", dict(allocators._objects))


def least(sites, budget):
    return [min(options, key=lambda o: o.nbytes) for options in sites]


def test_registered_name(registry):
    assert register_allocator("least")(least) is least
    assert resolve_allocator("least") is least
    assert DAFConfig(allocator="least").allocator == "least"
    with pytest.raises(ValueError, match="allocator 'greedy' is registered already"):
        register_allocator("greedy")(least)


def test_allocators_of_the_users(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def least(sites, budget):\n    return [min(o, key=lambda p: p.nbytes) for o in sites]"
    )
    for spec in (least, f"{path}:least"):
        model, inputs = build("bert"), batch("bert")
        daf, compressor = compressed(model, 0.4, allocator=spec)
        gradients(model, inputs, daf)
        assert {s.option.bits for s in compressor.tracker.sites.values() if s.candidates} == {0}


@pytest.mark.parametrize("spec", ["unheard", "math:pi", "absent.py:x", 3])
def test_what_is_no_allocator(spec):
    with pytest.raises(ValueError, match=r"allocator=.*use one of .*'greedy'"):
        DAFConfig(allocator=spec)


@pytest.mark.parametrize(
    "wrong", [lambda s, b: [], lambda s, b: None, lambda s, b: [s[0][0]] * len(s), lambda s, b: s]
)
def test_an_allocator_must_choose_of_what_is_offered(wrong):
    with pytest.raises(ValueError, match=r"allocator=.*must return one of each site's own options"):
        allocate(wrong, [rungs(1), rungs(2)], 10)
