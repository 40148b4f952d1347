"""How codecs distort tensors, measured with the compressor's own kernels."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .candidates import reads_gelu_slope
from .codecs import Codec, gelu_slope
from .fitting import fitted
from .kernels import reference
from .kernels.format import MAX_BITS, PAGE_BYTES, Granularity, PageSpace
from .saved_tensors import Compressor
from .sites import SaveSite

if TYPE_CHECKING:
    from .watching import Item

SAMPLE_ELEMENTS = 1 << 16
SAMPLE_COLS = 512
"""A codec's distortion is measured on about so many elements, of at most so many columns."""

STATISTICS_ELEMENTS = 1 << 20
"""Statistics of channels and tensors are taken from about so many: their range grows with them."""

FITTED_ELEMENTS = 1 << 17
"""Smaller tensors are left to the named codebooks: a plane of them is less than a codebook."""

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
        self._many = sample(kept, cols, STATISTICS_ELEMENTS)[0].float()
        self._known: dict[tuple[Any, ...], tuple[Tensor, Tensor] | None] = {}

    def statistics(self, codec: Codec, bits: int) -> tuple[Tensor, Tensor] | None:
        """Each element's ``(a, s)``; None where the codec cannot represent the elements."""
        layout = codec.layout(self.values.numel(), self.cols, bits)
        key = (codec.granularity, codec.book.statistics, layout.wide, bits > 0)
        if key not in self._known:
            shared = codec.granularity in (Granularity.CHANNEL, Granularity.TENSOR)
            values = self._many if shared else self.values
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
        """Distortions at 0..8 bits of every codec worth trying, on a sample of the rows."""
        part = _Sample(item)
        exact = in_terms(item.site, part.values)
        energy = float(exact.square().sum())
        if not energy > 0 or not math.isfinite(energy):
            return {}
        found: dict[Codec, tuple[float, ...]] = {}

        def measure(codec: Codec) -> None:
            errors = [
                float((in_terms(item.site, restored) - exact).square().sum()) / energy
                for bits, widths in ((0, (0,)), (4, (1, 2, 3, 4)), (8, (5, 6, 7, 8)))
                for restored in _restored(part, codec, bits, widths)
            ]
            if len(errors) == MAX_BITS + 1:
                found[codec] = tuple(errors)

        for codec in self._candidates.at(item.site, part.values, part.cols):
            measure(codec)
        fit = self._candidates.automatic and item.flat.numel() >= FITTED_ELEMENTS
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
        pages = max(1, layout.pages(bits))
        memory = torch.empty(pages * PAGE_BYTES, dtype=torch.uint8, device=self._device)
        space = PageSpace(1 << (pages - 1).bit_length(), [memory], array("q", [memory.data_ptr()]))
        table = array("i", range(layout.pages(bits)))
        if not self._backend.encode(flat, layout, bits, table, space):
            return item.flat, 0.0
        restored = torch.empty_like(flat)
        self._backend.decode(restored, layout, bits, table, space)
        exact = in_terms(item.site, flat)
        error = float((in_terms(item.site, restored) - exact).square().sum())
        energy = float(exact.square().sum())
        return item.spread(restored), error / energy if energy > 0 else 0.0


def _restored(part: _Sample, codec: Codec, bits: int, widths: tuple[int, ...]) -> Iterator[Tensor]:
    """The sample, encoded with ``bits`` bits and restored from each of ``widths``."""
    statistics = part.statistics(codec, bits)
    if statistics is None:
        return
    a, s = statistics
    book = codec.book
    codes = reference.quantize(part.values, a, s, book)
    for width in widths:
        yield a + s * book.tables[width].to(codes.device)[(codes >> (MAX_BITS - width)).long()]


def _worth_fitting(found: dict[Codec, tuple[float, ...]]) -> list[Codec]:
    """The best codecs; of those with the same statistics the first."""
    kept: dict[tuple[Any, ...], Codec] = {}
    for codec in sorted(found, key=lambda codec: found[codec][FITTED_AT]):
        kept.setdefault((codec.granularity, codec.book.statistics), codec)
    return list(kept.values())[:FITTED_BEST]


def in_terms(site: SaveSite, flat: Tensor) -> Tensor:
    """The elements in the terms in which their consumer feels an error."""
    values = flat.float()
    return gelu_slope(values) if reads_gelu_slope(site) else values
