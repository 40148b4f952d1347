"""Plans within a budget of bytes and a limit of seconds.

Seconds get a price, which is added to every option's cost (Lagrangian relaxation of the limit;
Everett, *Generalized Lagrange multiplier method for solving problems of optimum allocation of
resources*, Operations Research 11(3), 1963): which sites stay exact then follows what their bits
gain a byte and a second. A plan of the least total is of the least cost among those that take no
more time. The price is the lowest, by bisection, whose plan keeps to the limit; what is then left
of bytes and seconds goes where changing one or two sites gains most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from . import knapsack
from .allocation import Allocator, Option, allocate, points

DOUBLINGS = 60
BISECTIONS = 12
FIRST_CHANGES = 64
RAISES = 24
RAISE = 1.1
"""When an allocator's plan at greedy's price takes too long, by how much that is raised; tries."""


def allocate_in_time(
    spec: str | Allocator,
    sites: Sequence[Sequence[Option]],
    budget: float,
    limit: float,
) -> tuple[list[Option], float | None]:
    """What an allocator chooses when seconds have the price that keeps them to a limit.

    Args:
        spec: the allocator; it should minimise costs.
        sites: as for it; each option with its ``seconds``.
        budget: bytes, which come first.
        limit: seconds for all sites together (inf: none).

    Returns:
        One option a site; and None, or, where no plan within the bytes was found that keeps to the
        limit, the least seconds of one. The limit is then ignored.

    Raises:
        ValueError: when the allocator did not choose one of each site's options.
    """
    plan = allocate(spec, sites, budget)
    if not sites or sum(option.seconds for option in plan) <= limit:
        return plan, None
    nbytes, costs = points(sites)
    seconds = _seconds(sites, nbytes.shape)
    each = np.arange(len(sites))

    def seconds_of(chosen: knapsack.Integers) -> float:
        return float(seconds[each, chosen].sum())

    least = seconds_of(knapsack.best_gain_first(nbytes, seconds, budget))
    if least > limit:
        return plan, least
    low, high = 0.0, sum(o.cost for o in plan) / limit or 1.0 if limit else 1.0
    for _ in range(DOUBLINGS):
        if seconds_of(knapsack.best_gain_first(nbytes, costs + high * seconds, budget)) <= limit:
            break
        low, high = high, 2.0 * high
    for _ in range(BISECTIONS):
        price = (low + high) / 2
        chosen = knapsack.best_gain_first(nbytes, costs + price * seconds, budget)
        low, high = (low, price) if seconds_of(chosen) <= limit else (price, high)
    for _ in range(RAISES):
        chosen = _at_price(spec, sites, budget, high)
        if seconds_of(chosen) <= limit:
            best = _exchange(nbytes, costs, seconds, chosen, budget, limit)
            return [options[index] for options, index in zip(sites, best, strict=True)], None
        high *= RAISE
    return plan, least


def _seconds(sites: Sequence[Sequence[Option]], shape: tuple[int, ...]) -> knapsack.Floats:
    found = np.full(shape, np.inf)
    for row, options in enumerate(sites):
        found[row, : len(options)] = [option.seconds for option in options]
    return found


def _at_price(
    spec: str | Allocator, sites: Sequence[Sequence[Option]], budget: float, price: float
) -> knapsack.Integers:
    """The place of each site's option in the allocator's plan at this price of a second."""
    priced = [
        [dataclasses.replace(o, cost=o.cost + price * o.seconds) for o in options]
        for options in sites
    ]
    chosen = allocate(spec, priced, budget)
    places = (
        next(index for index, option in enumerate(options) if option is taken)
        for options, taken in zip(priced, chosen, strict=True)
    )
    return np.fromiter(places, np.int64, len(sites))


def _exchange(
    nbytes: knapsack.Floats,
    costs: knapsack.Floats,
    seconds: knapsack.Floats,
    plan: knapsack.Integers,
    budget: float,
    limit: float,
) -> knapsack.Integers:
    """The plan, with one or two sites changed while that lowers the cost and both are kept to.

    Tried are pairs of one of the changes that would gain most, and any other or none.
    """
    each, plan = np.arange(len(plan)), plan.copy()
    rows, places = np.nonzero(np.isfinite(nbytes))
    while True:
        now = rows, plan[rows]
        extra, dearer, longer = (a[rows, places] - a[now] for a in (nbytes, costs, seconds))
        room, time = (
            most - a[each, plan].sum() for most, a in ((budget, nbytes), (limit, seconds))
        )
        first = np.argsort(dearer, kind="stable")[:FIRST_CHANGES]
        first = first[dearer[first] < 0]
        fits = (extra[first, None] + extra <= room) & (longer[first, None] + longer <= time)
        fits &= (rows[first, None] != rows) | (places == plan[rows])
        total = np.where(fits, dearer[first, None] + dearer, 0.0)
        if not total.size or not total.min() < 0:
            return plan
        one, other = np.unravel_index(total.argmin(), total.shape)
        plan[rows[other]] = places[other]
        plan[rows[first[one]]] = places[first[one]]
