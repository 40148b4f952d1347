"""Which codec and how many bits each save site gets.

A site offers options: points of (bytes, cost), where cost is the predicted squared relative
error of the gradient. Errors of single sites add up (measured; see docs), so the whole plan's
cost is the sum, and the best plan under a budget is a multiple-choice knapsack's.

An allocator is a callable ``allocator(sites, budget) -> options``: for each site its options (at
least one) and bytes for all of them together in, one option a site out. When even the smallest do
not fit, it should return these.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from . import knapsack
from .codecs import Codec
from .registry import Registry


@dataclass(frozen=True)
class Option:
    """One way to store a site's tensors of a step.

    Attributes:
        nbytes: bytes against the budget.
        cost: predicted squared relative gradient error.
        codec: None stores exactly.
        bits: bit width; None for exact.
        costs: ``codec``'s cost at 0..8 bits, for demotion.
        importance: the site's, for allocators that have an error model of their own.
        seconds: of encoding and restoring (0 where nobody asks for it).
    """

    nbytes: int
    cost: float
    codec: Codec | None
    bits: int | None
    costs: tuple[float, ...] = ()
    importance: float = 1.0
    seconds: float = 0.0


Allocator = Callable[[Sequence[Sequence[Option]], float], list[Option]]

ALLOCATORS: Registry[Allocator] = Registry(
    "allocator", "daf_hf.allocators", expected="a callable (sites, budget) -> list of options"
)


def register_allocator(name: str) -> Callable[[Allocator], Allocator]:
    """Register an allocator under a name for ``allocator="name"``.

    Example:
        >>> @register_allocator("least")
        ... def least(sites, budget):
        ...     return [min(options, key=lambda option: option.nbytes) for options in sites]

    Raises:
        ValueError: when the name is taken by another allocator.
    """
    return ALLOCATORS.register(name)


def resolve_allocator(spec: str | Allocator) -> Allocator:
    """The allocator that a name, a path or a callable stands for; see :class:`Registry`.

    Raises:
        ValueError: naming the option, the value and what is allowed.
    """
    return ALLOCATORS.resolve(spec)


def allocate(
    spec: str | Allocator, sites: Sequence[Sequence[Option]], budget: float
) -> list[Option]:
    """What an allocator chooses, checked.

    Raises:
        ValueError: when it did not choose one of each site's options.
    """
    chosen: Any = resolve_allocator(spec)(sites, budget)
    offered = [{id(option) for option in options} for options in sites]
    try:
        fine = [id(option) in ids for option, ids in zip(chosen, offered, strict=True)]
    except (TypeError, ValueError):
        fine = [False]
    if not all(fine):
        raise ValueError(
            f"allocator={spec!r} gave {chosen!r:.200}: an allocator must return one of each "
            f"site's own options, a list of {len(sites)}"
        )
    return list(chosen)


def points(sites: Sequence[Sequence[Option]]) -> tuple[knapsack.Floats, knapsack.Floats]:
    """Bytes and costs of all options: ``float64 [sites, options]``, padded with inf."""
    counts = [len(options) for options in sites]
    there = np.arange(max(counts)) < np.array(counts)[:, None]
    nbytes, costs = np.full((2, *there.shape), np.inf)
    every = list(chain.from_iterable(sites))
    nbytes[there] = [option.nbytes for option in every]
    costs[there] = [option.cost for option in every]
    return nbytes, costs


def _options(sites: Sequence[Sequence[Option]], plan: knapsack.Integers) -> list[Option]:
    return [options[index] for options, index in zip(sites, plan.tolist(), strict=True)]


def lower_hull(options: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull of (bytes, cost), by ascending bytes."""
    start, edges = knapsack.hulls(*points([options]))
    return [options[index] for index in (*start, *edges.points)]


@register_allocator("greedy")
def greedy(sites: Sequence[Sequence[Option]], budget: float) -> list[Option]:
    """Best gain per byte first, along each site's hull; then what is left is searched.

    See :func:`daf_hf.knapsack.best_gain_first`. O(n log n) in the number of options, unless the
    result is more than half a percent above the lower bound that it gives. Never more than one
    hull edge above the optimum; measured, within 1 % (``benchmarks/allocation.py``).

    Args:
        sites: for each site its options (at least one).
        budget: bytes for all of them together.

    Returns:
        One option a site. When even the smallest do not fit, these.
    """
    if not sites:
        return []
    return _options(sites, knapsack.best_gain_first(*points(sites), budget))


@register_allocator("exact")
def exact(sites: Sequence[Sequence[Option]], budget: float) -> list[Option]:
    """The plan of the least cost, by integer linear programming: to judge the others by.

    The multiple-choice knapsack problem (Kellerer, Pferschy and Pisinger, *Knapsack Problems*,
    Springer 2004, ch. 11), solved by HiGHS to a relative gap of 1e-6. Takes up to seconds a plan.

    Args:
        sites: as for :func:`greedy`.
        budget: likewise.

    Raises:
        ImportError: without scipy.
    """
    if not sites:
        return []
    return _options(sites, knapsack.exact(*points(sites), budget))


@register_allocator("uniform")
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


@register_allocator("fixed8")
def fixed8(sites: Sequence[Sequence[Option]], budget: float) -> list[Option]:
    """8 bits for all, whatever the budget: the arena then makes room by dropping planes.

    Shows what demotion alone does. A site that does not offer 8 bits takes its nearest lower width.
    """
    return [_widest(options, 8) for options in sites]


@register_allocator("actnn")
def actnn(sites: Sequence[Sequence[Option]], budget: float) -> list[Option]:
    """ActNN's rule: from the top, lower the site whose variance rises least per byte saved.

    Minimises ``sum_l w_l / (2^b_l - 1)^2`` (Chen et al., *ActNN: Reducing Training Memory
    Footprint via 2-Bit Activation Compressed Training*, ICML 2021, arXiv 2104.14129, section 4;
    ``calc_precision.cc`` of its code). ``w_l`` is the site's importance; measured distortions only
    choose among codecs of equal width. ActNN has no 0 bits, where its model has no value: these
    come when all sites are down to what they have above that, the least importance per byte first.

    Args:
        sites: as for :func:`greedy`.
        budget: likewise; ActNN's total of bits is bytes here.
    """
    return _lowered(sites, budget, lambda bits: (2.0**bits - 1) ** -2 if bits else math.inf)


@register_allocator("gact")
def gact(sites: Sequence[Sequence[Option]], budget: float) -> list[Option]:
    """GACT's rule: the same search for ``sum_l c_l 4^-b_l`` under an average of bits.

    Liu et al., *GACT: Activation Compressed Training for Generic Network Architectures*, ICML 2022,
    arXiv 2206.11357 (``autoprec.py`` and ``calc_precision.cc`` of its code). ``c_l`` is the site's
    importance. Its code knows the widths of ``bits=(1, 2, 4, 8)``, and exact, only.

    Args:
        sites: as for :func:`greedy`.
        budget: likewise; GACT's average of bits is bytes here.
    """
    return _lowered(sites, budget, lambda bits: 4.0**-bits)


def _lowered(
    sites: Sequence[Sequence[Option]], budget: float, error: Callable[[float], float]
) -> list[Option]:
    """Every site at its widest, then one step down after another until all fit.

    Args:
        sites: as for :func:`greedy`.
        budget: likewise.
        error: at a bit width, of a site of importance 1; inf where there is no model of it.
    """
    ladders = [_ladder(options) for options in sites]
    places = [0] * len(ladders)
    spent = sum(ladder[0].nbytes for ladder in ladders)
    heap: list[tuple[bool, float, int]] = []

    def offer(site: int) -> None:
        ladder, place = ladders[site], places[site]
        if place + 1 < len(ladder):
            wide, narrow = ladder[place], ladder[place + 1]
            rise = error(_width(narrow)) - error(_width(wide))
            unknown = not math.isfinite(rise)
            rise = wide.importance * (1.0 if unknown else rise)
            heapq.heappush(heap, (unknown, rise / (wide.nbytes - narrow.nbytes), site))

    for site in range(len(ladders)):
        offer(site)
    while spent > budget and heap:
        site = heapq.heappop(heap)[-1]
        spent += ladders[site][places[site] + 1].nbytes - ladders[site][places[site]].nbytes
        places[site] += 1
        offer(site)
    return [ladder[place] for ladder, place in zip(ladders, places, strict=True)]


def _ladder(options: Sequence[Option]) -> list[Option]:
    """The best option of each width, widest first, as far as it saves bytes; then the smallest."""
    widths = sorted({_width(option) for option in options}, reverse=True)
    steps = [_widest(options, width) for width in widths]
    ladder = steps[:1]
    for option in (*steps[1:], min(options, key=lambda o: o.nbytes)):
        if option.nbytes < ladder[-1].nbytes:
            ladder.append(option)
    return ladder


def _widest(options: Sequence[Option], width: float) -> Option:
    """The best option of the greatest width up to ``width`` (else of the least there is)."""
    widths = [_width(option) for option in options]
    best = max((w for w in widths if w <= width), default=min(widths))
    return min((o for o in options if _width(o) == best), key=lambda o: (o.cost, o.nbytes))


def _width(option: Option) -> float:
    return math.inf if option.bits is None else option.bits
