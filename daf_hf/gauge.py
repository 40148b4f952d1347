"""How codecs distort tensors, measured with the compressor's own kernels."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .candidates import keeps_zeros, reads_gelu_slope, reads_sign, serves
from .codecs import Codec, gelu_slope
from .fitting import fitted
from .kernels import reference
from .kernels.format import MAX_BITS, PAGE_BYTES, Granularity, Layout, PageSpace, Statistics
from .matching import RowStatistics
from .saved_tensors import Compressor
from .sites import SaveSite
from .tensors import are_rows

if TYPE_CHECKING:
    from .watching import Item

SAMPLE_ELEMENTS = 1 << 16
SAMPLE_COLS = 512
"""A codec's distortion is measured on about so many elements, of at most so many columns."""

STATISTICS_ELEMENTS = 1 << 20
"""The range of channels and tensors is taken from about so many, for it grows with them."""

FITTED_ELEMENTS = 1 << 17
"""Smaller tensors are left to the named codebooks: a plane of them is less than a codebook."""

SMALLEST_ROW = 1e-6
"""Mean square below which a row's size no longer counts, as a normalisation's epsilon has it."""

_WIDTHS = ((0, (0,)), (4, (1, 2, 3, 4)), (8, (5, 6, 7, 8)))
"""Bits with which a sample is encoded, and those at which it is looked at: as far as statistics
are stored alike."""

FITTED_AT = 2
FITTED_BEST = 2
"""Codebooks are fitted for so many of the best codecs at this width."""


def sample(flat: Tensor, cols: int, elements: int = SAMPLE_ELEMENTS) -> tuple[Tensor, int]:
    """About so many elements of evenly spaced rows, and their columns.

    Few long rows would make the statistics of a channel look better than they are, so of long
    rows only the first columns are taken.
    """
    rows = flat.numel() // cols
    kept = min(cols, SAMPLE_COLS)
    wanted = elements // kept
    if rows <= wanted and kept == cols:
        return flat, cols
    index = torch.linspace(0, rows - 1, min(rows, wanted), device=flat.device).long()
    return flat.view(rows, cols)[index, :kept].reshape(-1), kept


class _Sample:
    """Part of a tensor, and what its statistics are in the whole of it.

    Args:
        item: the tensor.
    """

    def __init__(self, item: Item) -> None:
        kept, cols = item.kept(), item.cols
        flat, self.cols = sample(kept, cols)
        self.values = flat.float()
        self.weights = _weights(item, self.values, self.cols)
        self._many = sample(kept, cols, STATISTICS_ELEMENTS)[0].float()
        self._known: dict[tuple[Any, ...], tuple[Tensor, Tensor] | None] = {}

    def statistics(self, codec: Codec, bits: int) -> tuple[Tensor, Tensor] | None:
        """Each element's ``(a, s)``; None where the codec cannot represent the elements."""
        layout = codec.layout(self.values.numel(), self.cols, bits)
        key = (codec.granularity, codec.book.statistics, layout.wide, bits > 0)
        if key not in self._known:
            shared = codec.granularity in (Granularity.CHANNEL, Granularity.TENSOR)
            grows = shared and bits and codec.book.statistics is Statistics.RANGE
            values = self._many if grows else self.values
            of = codec.layout(values.numel(), self.cols, bits)
            a, s, finite = reference.statistics(values, of, bits)
            expanded = (reference.expand(a, layout), reference.expand(s, layout))
            self._known[key] = expanded if finite else None
        return self._known[key]


class Gauge:
    """Measures codecs on tensors: candidates on a sample, what was chosen with the own kernels."""

    def __init__(self, compressor: Compressor) -> None:
        self._backend = compressor.backend
        self._device = compressor.device
        self._candidates = compressor.placement.candidates

    def distortions(self, item: Item) -> dict[Codec, tuple[float, ...]]:
        """Distortions at 0..8 bits of every codec worth trying, on a sample of the rows.

        Those are the codecs that an earlier calibration left to choose from, fitted ones as they
        are, while they can represent the elements.
        """
        part = _Sample(item)
        exact = in_terms(item.site, part.values)
        energy = float((exact.square() * part.weights).sum())
        if not energy > 0 or not math.isfinite(energy):
            return {}
        found: dict[Codec, tuple[float, ...]] = {}

        def measure(codec: Codec) -> None:
            in_terms_of_its_own = (
                item.matched or reads_gelu_slope(item.site) or reads_sign(item.site)
            )
            errors = [
                error / energy
                for bits, widths in _WIDTHS
                for error in (
                    _errors_in_terms(item, part, exact, codec, bits, widths)
                    if in_terms_of_its_own
                    else _errors(part, codec, bits, widths)
                )
            ]
            if len(errors) == MAX_BITS + 1:
                found[codec] = tuple(errors)

        for codec in item.site.distortions:
            if serves(codec, item.site):
                measure(codec)
        if found:
            return found
        for codec in self._candidates.at(item.site, part.values, part.cols):
            measure(codec)
        fit = self._candidates.automatic and item.flat.numel() >= FITTED_ELEMENTS
        fit &= not (reads_sign(item.site) or keeps_zeros(item.site, part.values))
        for codec in _worth_fitting(found) if fit else ():
            statistics = part.statistics(codec, FITTED_AT)
            if statistics is not None:
                measure(fitted(codec, part.values, *statistics))
        return found

    def restore(self, item: Item, codec: Codec, bits: int) -> tuple[Tensor, float]:
        """The item's elements encoded and decoded, and their distortion.

        The elements themselves, and 0, where the codec cannot represent them.
        """
        flat = item.kept()
        layout = codec.layout(flat.numel(), item.cols, bits)
        table, space = scratch_pages(layout, bits, self._device)
        if not self._backend.encode(flat, layout, bits, table, space):
            return item.flat, 0.0
        restored = torch.empty_like(flat)
        self._backend.decode(restored, layout, bits, table, space)
        if item.matched:
            restored = RowStatistics.of(flat, item.cols).match(restored)
        exact = in_terms(item.site, flat)
        weights = _weights(item, flat, item.cols)
        error = float(((in_terms(item.site, restored) - exact).square() * weights).sum())
        energy = float((exact.square() * weights).sum())
        return item.spread(restored), error / energy if energy > 0 else 0.0


def scratch_pages(layout: Layout, bits: int, device: torch.device) -> tuple[array, PageSpace]:
    """A page table, and pages of its own, for one tensor outside of any arena."""
    pages = max(1, layout.pages(bits))
    memory = torch.empty(pages * PAGE_BYTES, dtype=torch.uint8, device=device)
    space = PageSpace(1 << (pages - 1).bit_length(), [memory], array("q", [memory.data_ptr()]))
    return array("i", range(layout.pages(bits))), space


def _errors(part: _Sample, codec: Codec, bits: int, widths: tuple[int, ...]) -> list[float]:
    """Squared errors of the sample, encoded with ``bits`` bits, at each of ``widths``.

    ``x - a - s t`` is ``r + s (t' - t)`` with the residual ``r`` of the longest code, whose value
    is ``t'``: so three sums over the elements of each code tell the errors of all shorter ones.
    """
    statistics = part.statistics(codec, bits)
    if statistics is None:
        return []
    values, (a, s) = part.values, statistics
    if not bits:
        return [float(((values - a).square() * part.weights).sum())]
    codes = reference.quantize(values, a, s, codec.book).long()
    tables = [table.to(codes.device) for table in codec.book.tables]
    finest = tables[MAX_BITS]
    residual = values - (a + s * finest[codes])
    squares, products, scales = (
        torch.bincount(codes, (sums * part.weights).double(), len(finest))
        for sums in (residual.square(), residual * s, s.square().expand(len(values)))
    )
    each = torch.arange(len(finest), device=codes.device)
    return [
        float((squares + 2 * off * products + off.square() * scales).sum())
        for width in widths
        for off in [finest.double() - tables[width][each >> (MAX_BITS - width)]]
    ]


def _errors_in_terms(
    item: Item,
    part: _Sample,
    exact: Tensor,
    codec: Codec,
    bits: int,
    widths: tuple[int, ...],
) -> list[float]:
    """The same in terms of the site's consumer, ``exact``, or of matched rows, which sums by code
    do not tell.
    """
    statistics = part.statistics(codec, bits)
    if statistics is None:
        return []
    a, s = statistics
    rows = RowStatistics.of(part.values, part.cols) if item.matched else None
    codes = reference.quantize(part.values, a, s, codec.book)
    found = []
    for width in widths:
        table = codec.book.tables[width].to(codes.device)
        restored = a + s * table[(codes >> (MAX_BITS - width)).long()]
        if rows is not None:
            restored = rows.match(restored)
        errors = (in_terms(item.site, restored) - exact).square()
        found.append(float((errors * part.weights).sum()))
    return found


def _worth_fitting(found: dict[Codec, tuple[float, ...]]) -> list[Codec]:
    """The best codecs; of those with the same statistics the first."""
    kept: dict[tuple[Any, ...], Codec] = {}
    for codec in sorted(found, key=lambda codec: found[codec][FITTED_AT]):
        kept.setdefault((codec.granularity, codec.book.statistics), codec)
    return list(kept.values())[:FITTED_BEST]


def _weights(item: Item, flat: Tensor, cols: int) -> Tensor | float:
    """What each element's squared error counts for: all the same, unless rows are normalised.

    A normalisation divides every row by its own size, and so the error of a small row matters as
    much as that of a large one: errors and elements are taken relative to the row's mean square.

    Args:
        item: whose elements they are.
        flat: elements ``[rows * cols]`` of it.
        cols: elements a row.
    """
    if not item.site.normalised or not are_rows(item.columns, item.shape):
        return 1.0
    squares = flat.float().view(-1, cols).square().mean(1)
    return (1 / (squares + SMALLEST_ROW)).repeat_interleave(cols)


def in_terms(site: SaveSite, flat: Tensor) -> Tensor:
    """The elements in the terms in which their consumer feels an error."""
    if reads_sign(site):
        return (flat > 0).float()
    values = flat.float()
    return gelu_slope(values) if reads_gelu_slope(site) else values
