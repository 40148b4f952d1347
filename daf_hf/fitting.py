"""Codebooks fitted to the values of one save site.

The named codebooks are made for a distribution: a Gaussian, a softmax's output. What a site really
saves can be had in calibration, and a codebook is but data. A fitted one takes grid and statistics
from a named one, and replaces bins and values: a tree of cuts, each of which splits a bin in the
two that leave the least squared error (a tree-structured quantizer; Buzo, Gray, Gray and Markel,
*Speech coding based upon vector quantization*, IEEE Trans. ASSP 28(5), 1980). The path to a leaf
is the code, so that its first bits are the code of fewer bits: the tree is what an embedded
quantizer can do best, cut by cut from the top.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .codebook_check import check_codebook
from .codecs import Codec, cell_centres, gelu_slope, normal, root, slope_inputs, statistics_of
from .kernels import reference
from .kernels.format import MAX_BITS, Codebook, Granularity, Statistics
from .kernels.reference import cells_of

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_TRACE = 1e-6


def fitted(codec: Codec, values: Tensor, a: Tensor, s: Tensor) -> Codec:
    """A codec of the same granularity and statistics, fitted to values.

    Args:
        codec: of range or moments statistics, or GELU's.
        values: ``fp32 [n]``.
        a: the first of their statistics ``[n]`` (or ``[1]``); of no use for GELU's.
        s: the second.
    """
    if codec.private:
        return dataclasses.replace(codec, fitted=_fitted_to_slopes(codec.book, values))
    # `uniform` has a cell a code: too few to place cuts in.
    base = root() if codec.book.statistics is Statistics.RANGE else codec.book
    cells = cells_of(values, a, s, base).long()
    weight, moment = s.square().expand(len(values)), s * (values - a)
    return dataclasses.replace(
        codec,
        fitted=_book(
            base, cell_centres(base), _sums(cells, weight, moment, base.cells), np.float32
        ),
    )


def codebook_from_samples(
    name: str, samples: Any, statistics: str | Statistics = "moments"
) -> Codebook:
    """A codebook for values that are distributed as these are, by the same tree of cuts.

    Args:
        name: what it is called in reports.
        samples: values of one unit: a tensor, an array or a list, of any shape. They are
            normalised by their own statistics. A distribution's quantiles at evenly spaced
            probabilities do as well.
        statistics: what a unit is normalised by: ``"moments"`` (mean and standard deviation) or
            ``"range"`` (minimum and maximum).

    Raises:
        ValueError: for samples or statistics that cannot serve.
    """
    kind = statistics_of(statistics)
    if kind is Statistics.NONE:
        raise ValueError(f"statistics={statistics!r}: use 'moments' or 'range'")
    base = normal() if kind is Statistics.MOMENTS else root()
    values = torch.as_tensor(samples).detach().cpu().flatten().float()
    if not len(values) or not values.isfinite().all() or not values.max() > values.min():
        raise ValueError(f"codebook {name!r}: use finite samples that are not all the same")
    layout = Codec(Granularity.TENSOR, base).layout(len(values), len(values), MAX_BITS)
    a, s, _ = reference.statistics(values, layout, MAX_BITS)
    cells = cells_of(values, a, s, base).long()
    sums = _sums(cells, torch.ones_like(values), (values - a) / s, base.cells)
    # A trace of every cell's own middle: for values that are in no sample.
    trace, centres = _TRACE * len(values) / base.cells, cell_centres(base)
    weight, moment = sums[0] + trace, sums[1] + trace * centres
    book = dataclasses.replace(_book(base, centres, (weight, moment), np.float32), name=name)
    check_codebook(book)
    return book


def _fitted_to_slopes(base: Codebook, values: Tensor) -> Codebook:
    """Fitted in terms of GELU's derivative, which is not monotonic: the cells are taken by it."""
    one = torch.ones(1, device=values.device)
    cells = cells_of(values, 0.0 * one, one, base).long()
    slopes = gelu_slope(values)
    centres = gelu_slope(torch.from_numpy(cell_centres(base))).numpy()
    sums = _sums(cells, torch.ones_like(values), slopes, base.cells)
    return _book(base, centres, sums, slope_inputs)


def _sums(cells: Tensor, weight: Tensor, moment: Tensor, count: int) -> tuple[Floats, Floats]:
    """Weight and first moment of the values in each of ``count`` cells."""
    totals = [
        torch.bincount(cells, each.double(), count).cpu().numpy() for each in (weight, moment)
    ]
    return totals[0], totals[1]


def _book(
    base: Codebook,
    centres: Floats,
    sums: tuple[Floats, Floats],
    restore: Callable[[Floats], NDArray],
) -> Codebook:
    """``base`` with the tree's codes, and with the means of its bins through ``restore``."""
    order = np.argsort(centres, kind="stable")
    weight, moment = (total[order] for total in sums)
    codes = tree_codes(weight, moment)
    lut = np.empty(len(order), np.uint8)
    lut[order] = codes
    tables, means = [], np.zeros(1)
    for bits in range(MAX_BITS + 1):
        bins = codes >> (MAX_BITS - bits)
        weights = np.bincount(bins, weight, 1 << bits)
        moments = np.bincount(bins, moment, 1 << bits)
        parents = np.repeat(means, 2) if bits else means
        # A bin without values takes what the wider one has.
        means = np.divide(moments, weights, out=parents.copy(), where=weights > 0)
        tables.append(torch.from_numpy(np.asarray(restore(means), np.float32)))
    return dataclasses.replace(base, lut=torch.from_numpy(lut), tables=tuple(tables))


def tree_codes(weight: Floats, moment: Floats) -> Integers:
    """The 8-bit code of each cell, by repeated optimal cuts in two.

    Args:
        weight: of the values in each cell, in ascending order.
        moment: their weighted sum.
    """
    cells = np.arange(len(weight))
    total_weight = np.concatenate([[0.0], np.cumsum(weight)])
    total_moment = np.concatenate([[0.0], np.cumsum(moment)])
    codes = np.zeros(len(weight), np.int64)
    first, end = np.zeros(1, np.int64), np.full(1, len(weight), np.int64)

    def energy(start: Integers, stop: Integers) -> Floats:
        """What is explained by the mean of the cells in between."""
        weights = total_weight[stop] - total_weight[start]
        moments = total_moment[stop] - total_moment[start]
        return np.divide(moments**2, weights, out=np.zeros(len(cells)), where=weights > 0)

    for _ in range(MAX_BITS):
        start, stop = first[codes], end[codes]
        gain = energy(start, cells) + energy(cells, stop)
        gain[cells == start] = -np.inf  # nothing would be left of the cut
        best = np.full(len(first), -np.inf)
        np.maximum.at(best, codes, gain)
        # Cuts anywhere in a gap are as good as each other: the middle is fair to what will come.
        ties = np.isfinite(gain) & (gain >= best[codes])
        count = np.bincount(codes[ties], minlength=len(first))
        places = np.bincount(codes[ties], cells[ties], len(first))
        cut = np.where(count > 0, places // np.maximum(count, 1), end).astype(np.int64)
        codes = 2 * codes + (cells >= cut[codes])
        first, end = np.stack([first, cut], 1).ravel(), np.stack([cut, end], 1).ravel()
    return codes
