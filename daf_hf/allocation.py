"""Which codec and how many bits each save site gets.

A site offers options: points of (bytes, cost), where cost is the predicted squared relative
error of the gradient. Errors of single sites add up (measured; see docs), so the whole plan's
cost is the sum, and the best plan under a budget follows the options' lower convex hull.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .codecs import Codec


@dataclass(frozen=True)
class Option:
    """One way to store a site's tensors of a step.

    Attributes:
        nbytes: bytes against the budget.
        cost: predicted squared relative gradient error.
        codec: None stores exactly.
        bits: bit width; None for exact.
        costs: ``codec``'s cost at 0..8 bits, for demotion.
    """

    nbytes: int
    cost: float
    codec: Codec | None
    bits: int | None
    costs: tuple[float, ...] = ()


def lower_hull(options: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull of (bytes, cost), by ascending bytes."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.nbytes, o.cost)):
        if hull and option.cost >= hull[-1].cost:
            continue
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(a: Option, b: Option) -> float:
    """Cost saved per byte from ``a`` to ``b``."""
    return (a.cost - b.cost) / (b.nbytes - a.nbytes)


def greedy(sites: Sequence[Sequence[Option]], budget: float) -> list[Option]:
    """Best gain per byte first, along each site's hull.

    O(n log n) in the number of options. Within one hull edge of the optimum: an edge that does
    not fit is passed over and cheaper ones are still tried.

    Args:
        sites: for each site its options (at least one).
        budget: bytes for all of them together.

    Returns:
        One option a site. When even the smallest do not fit, these.
    """
    hulls = [lower_hull(options) for options in sites]
    chosen = [hull[0] for hull in hulls]
    spent = sum(option.nbytes for option in chosen)
    edges = [
        (-_slope(a, b), index, b) for index, hull in enumerate(hulls) for a, b in pairwise(hull)
    ]
    edges.sort(key=lambda edge: edge[0])
    for _, index, option in edges:
        extra = option.nbytes - chosen[index].nbytes
        if spent + extra <= budget:
            chosen[index] = option
            spent += extra
    return chosen


def uniform(sites: Sequence[Sequence[Option]], budget: float) -> list[Option]:
    """The same bit width for all: the largest that fits (exact counts as the widest).

    A site that does not offer that width takes its nearest lower one, else its smallest option.
    """

    def at(width: float) -> list[Option]:
        return [_widest(options, width) for options in sites]

    widths = sorted({_width(o) for options in sites for o in options}, reverse=True)
    plan: list[Option] = []
    for width in widths:
        plan = at(width)
        if sum(option.nbytes for option in plan) <= budget:
            break
    return plan


def _widest(options: Sequence[Option], width: float) -> Option:
    """The best option of the greatest width up to ``width`` (else of the least there is)."""
    widths = [_width(option) for option in options]
    best = max((w for w in widths if w <= width), default=min(widths))
    return min((o for o in options if _width(o) == best), key=lambda o: (o.cost, o.nbytes))


def _width(option: Option) -> float:
    return math.inf if option.bits is None else option.bits


ALLOCATORS: dict[str, Callable[[Sequence[Sequence[Option]], float], list[Option]]] = {
    "greedy": greedy,
    "uniform": uniform,
}
