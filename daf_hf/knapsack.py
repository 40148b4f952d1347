"""The multiple-choice knapsack: one point of each row, within a budget, of the least total cost.

Rows are sites, points are their (bytes, cost). The linear relaxation has a closed form: the edges
of all rows' lower convex hulls, steepest first, until one no longer fits (Sinha and Zoltners, *The
multiple-choice knapsack problem*, Operations Research 27(3), 1979). What follows from it are a
plan, a lower bound on every plan's cost, and, where the two are apart, the few points that a better
plan may differ in: its *core* (Pisinger, *A minimal algorithm for the multiple-choice knapsack
problem*, European Journal of Operational Research 83(2), 1995).

Arrays: ``nbytes`` and ``costs`` are ``float64 [rows, points]``, padded with inf; a plan is
``int64 [rows]``, the point of each row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

CLOSE = 5e-3
"""A plan whose cost is within this share of the lower bound is not improved any further."""

STATES = 512
"""Partial plans that the search of the core keeps."""


class Edges(NamedTuple):
    """Edges of lower convex hulls, all first ones before all second ones.

    Attributes:
        rows: whose edge it is.
        points: where it leads to.
        slopes: cost saved per byte; along a row's hull they do not increase.
        nbytes: more than at its other end.
    """

    rows: Integers
    points: Integers
    slopes: Floats
    nbytes: Floats

    def take(self, which: Integers | slice) -> Edges:
        """Some of them, in that order."""
        return Edges(self.rows[which], self.points[which], self.slopes[which], self.nbytes[which])


def hulls(nbytes: Floats, costs: Floats) -> tuple[Integers, Edges]:
    """Where every row's lower convex hull begins (at the fewest bytes), and all edges of it.

    All rows at once go from vertex to vertex by the steepest edge (gift wrapping).
    """
    smallest = np.where(nbytes == nbytes.min(1)[:, None], costs, np.inf)
    start = at = smallest.argmin(1)
    rows, before = np.arange(len(nbytes)), np.full(len(nbytes), np.inf)
    steps: list[Edges] = []
    while len(rows):
        each = np.arange(len(rows))
        extra = nbytes - nbytes[each, at][:, None]
        gain = costs[each, at][:, None] - costs
        slope = np.divide(gain, extra, out=np.zeros_like(gain), where=(extra > 0) & (gain > 0))
        best = slope.max(1)
        to = np.where(slope == best[:, None], extra, -1.0).argmax(1)  # of equal ones the farthest
        found = best > 0
        before = np.minimum(best, before)[found]  # rounding must not upset their order
        rows, at, nbytes, costs = rows[found], to[found], nbytes[found], costs[found]
        steps.append(Edges(rows, at, before, extra[each, to][found]))
    return start, Edges(
        np.concatenate([step.rows for step in steps]),
        np.concatenate([step.points for step in steps]),
        np.concatenate([step.slopes for step in steps]),
        np.concatenate([step.nbytes for step in steps]),
    )


def best_gain_first(nbytes: Floats, costs: Floats, budget: float) -> Integers:
    """Edges of the hulls, steepest first, as far as they fit; then the core.

    An edge that does not fit is passed over and cheaper ones are still tried. If the plan's cost
    is not :data:`CLOSE` to the lower bound then, what is left is searched for a better one.

    Returns:
        A plan; of the fewest bytes where even that does not fit.
    """
    each = np.arange(len(nbytes))
    start, edges = hulls(nbytes, costs)
    room = budget - nbytes[each, start].sum()
    if room < 0 or not len(edges.rows):
        return start
    edges = edges.take(np.argsort(-edges.slopes, kind="stable"))
    spent = np.cumsum(edges.nbytes)
    fitting = int(np.searchsorted(spent, room, side="right"))
    relaxed = start.copy()
    relaxed[edges.rows[:fitting]] = edges.points[:fitting]  # of a row's edges the last counts
    if fitting == len(spent):
        return relaxed
    room -= spent[fitting - 1] if fitting else 0.0
    price = edges.slopes[fitting]
    bound = max(costs[each, relaxed].sum() - price * room, 0.0)  # but for rounding it is
    plan = _fill(nbytes, relaxed, edges.take(slice(fitting, None)), room)
    gap = costs[each, plan].sum() - bound
    if gap <= CLOSE * bound:
        return plan
    better = _search_core(nbytes, costs, relaxed, price, room, gap, CLOSE * bound)
    return plan if better is None else better


def _fill(nbytes: Floats, plan: Integers, edges: Edges, room: float) -> Integers:
    """Take what still fits of the edges, in their order."""
    fits = edges.nbytes <= room  # the others never will
    rows, points = edges.rows[fits], edges.points[fits]
    extra = (nbytes[rows, points] - nbytes[rows, plan[rows]]).tolist()
    plan = plan.copy()
    taken: dict[int, float] = {}
    for row, point, more in zip(rows.tolist(), points.tolist(), extra, strict=True):
        more -= taken.get(row, 0.0)
        if more <= room:
            plan[row] = point
            room -= more
            taken[row] = taken.get(row, 0.0) + more
    return plan


def _search_core(
    nbytes: Floats,
    costs: Floats,
    relaxed: Integers,
    price: float,
    room: float,
    gap: float,
    enough: float,
) -> Integers | None:
    """A plan that is less than ``gap`` above the lower bound, by dynamic programming.

    At ``price`` a byte, each point has a regret: what it costs more, its bytes paid for, than the
    row's point in ``relaxed``. A plan's cost is the lower bound, plus its regrets, plus what
    its unused room was worth. So no point with a regret of ``gap`` or more is in a better plan, and
    few rows have any other left. These are gone through, those with the least regrets first; where
    there are more than :data:`STATES` partial plans, the best of about the same bytes are kept.

    Args:
        nbytes: of the points.
        costs: of the points.
        relaxed: the plan up to the first edge that does not fit.
        price: the slope of that edge.
        room: bytes that the plan leaves.
        gap: what is to be improved on.
        enough: a gap that is small enough.

    Returns:
        None where there is none, or none was found.
    """
    each = np.arange(len(nbytes))
    extra = nbytes - nbytes[each, relaxed][:, None]
    regret = np.maximum(costs - costs[each, relaxed][:, None] + price * extra, 0.0)
    open_ = np.flatnonzero((regret < gap).sum(1) > 1)
    open_ = open_[np.argsort(np.partition(regret[open_], 1, axis=1)[:, 1], kind="stable")]
    spent, regrets = np.zeros(1), np.zeros(1)
    trace: list[tuple[Integers, Integers]] = []
    best: tuple[int, int] | None = None
    for row in open_:
        points = np.flatnonzero(regret[row] < gap)
        total = (regrets[:, None] + regret[row, points]).ravel()
        bytes_ = (spent[:, None] + extra[row, points]).ravel()
        kept = _best_by_bytes(bytes_, total, gap)
        spent, regrets = bytes_[kept], total[kept]
        trace.append((kept // len(points), points[kept % len(points)]))
        above = np.where(spent <= room, regrets + price * (room - spent), np.inf)
        state = int(above.argmin())
        if above[state] < gap:
            gap, best = above[state], (len(trace), state)
            if gap <= enough:
                break
    if best is None:
        return None
    length, state = best
    return _traced(relaxed, list(zip(open_, trace, strict=False))[:length], state)


def _traced(
    relaxed: Integers, trace: list[tuple[int, tuple[Integers, Integers]]], state: int
) -> Integers:
    """The plan that a state stands for, by each row's (parents of states, their points)."""
    plan = relaxed.copy()
    for row, (parents, points) in reversed(trace):
        plan[row] = points[state]
        state = parents[state]
    return plan


def _best_by_bytes(spent: Floats, regrets: Floats, gap: float) -> Integers:
    """Those worth keeping: of too many, the least regrets at about the same bytes."""
    order = np.flatnonzero(regrets < gap)
    if len(order) <= STATES:
        return order
    order = order[np.argsort(regrets[order], kind="stable")]
    kept = spent[order]
    low, high = kept.min(), kept.max()
    share = (kept - low) * (STATES / max(high - low, 1.0))
    return order[np.unique(share.astype(np.int64), return_index=True)[1]]


def exact(nbytes: Floats, costs: Floats, budget: float) -> Integers:
    """A plan of the least cost, by integer linear programming (HiGHS, through scipy).

    Returns:
        A plan; of the fewest bytes where even that does not fit.

    Raises:
        ImportError: without scipy.
        RuntimeError: when the solver gives up.
    """
    milp, LinearConstraint, csr_array = _scipy()
    start = best_gain_first(nbytes, costs, budget)
    each = np.arange(len(nbytes))
    good = costs[each, start].sum()
    if nbytes.min(1).sum() > budget or good == costs.min(1).sum():
        return start
    rows, points = np.nonzero(np.isfinite(nbytes))
    size, cost = nbytes[rows, points], costs[rows, points]
    one_each = csr_array((np.ones(len(rows)), (rows, np.arange(len(rows)))))
    limit, unit = budget, max(size.max(), 1.0) / 1e3
    while True:
        # The solver's tolerances are absolute: costs near 1, sizes up to 1000.
        found = milp(
            cost / good,
            integrality=np.ones(len(rows)),
            bounds=(0, 1),
            constraints=[
                LinearConstraint(one_each, 1, 1),
                LinearConstraint(csr_array(size[None] / unit), -np.inf, limit / unit),
            ],
            options={"mip_rel_gap": 1e-6},
        )
        if found.x is None:
            raise RuntimeError(
                f"allocator='exact': scipy.optimize.milp found none: {found.message}"
            )
        plan = start.copy()
        taken = found.x > 0.5
        plan[rows[taken]] = points[taken]
        excess = nbytes[each, plan].sum() - budget
        if excess <= 0:
            return plan if costs[each, plan].sum() < good else start
        limit -= excess  # within the solver's tolerance, not within the budget


def _scipy():
    try:
        from scipy.optimize import LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise ImportError(
            "allocator='exact' needs scipy: pip install scipy (or daf-hf[exact]), or use "
            "allocator='greedy'"
        ) from error
    return milp, LinearConstraint, csr_array
