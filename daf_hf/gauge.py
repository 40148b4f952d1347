"""How codecs distort tensors, measured with the compressor's own kernels."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .codecs import GELU, Codec, gelu_slope
from .kernels.format import MAX_BITS, PAGE_BYTES, Granularity, PageSpace
from .saved_tensors import Compressor
from .sites import SaveSite

if TYPE_CHECKING:
    from .probing import Item

SAMPLE_ELEMENTS = 1 << 16
SAMPLE_COLS = 512
"""A codec's distortion is measured on about so many elements, of at most so many columns."""


def sample(flat: Tensor, cols: int) -> tuple[Tensor, int]:
    """About ``SAMPLE_ELEMENTS`` elements of evenly spaced rows, and their columns.

    Few long rows would make the statistics of a channel look better than they are, so of long
    rows only the first columns are taken.
    """
    rows = flat.numel() // cols
    kept = min(cols, SAMPLE_COLS)
    wanted = SAMPLE_ELEMENTS // kept
    if rows <= wanted and kept == cols:
        return flat, cols
    index = torch.linspace(0, rows - 1, min(rows, wanted), device=flat.device).long()
    return flat.view(rows, cols)[index, :kept].reshape(-1), kept


class Gauge:
    """Measures codecs on tensors, with the compressor's own kernels."""

    def __init__(self, compressor: Compressor) -> None:
        self._backend = compressor.backend
        self._device = compressor.arena.device

    def distortions(self, item: Item) -> dict[Codec, tuple[float, ...]]:
        """Distortions at 0..8 bits of every codec worth trying, on a sample of the rows."""
        flat, cols = sample(item.flat, item.cols)
        exact = in_terms(item.site, flat)
        energy = float(exact.square().sum())
        if not energy > 0 or not math.isfinite(energy):
            return {}
        found = {}
        for codec in candidate_codecs(item.site, flat, cols):
            errors = [
                float((in_terms(item.site, restored) - exact).square().sum()) / energy
                for bits, widths in ((0, (0,)), (4, (1, 2, 3, 4)), (8, (5, 6, 7, 8)))
                for restored in self._decoded(flat, cols, codec, bits, widths)
            ]
            if len(errors) == MAX_BITS + 1:
                found[codec] = tuple(errors)
        return found

    def restore(self, item: Item, codec: Codec, bits: int) -> tuple[Tensor, float]:
        """The item's elements encoded and decoded, and their distortion.

        The elements themselves, and 0, where the codec cannot represent them.
        """
        for restored in self._decoded(item.flat, item.cols, codec, bits, (bits,)):
            exact = in_terms(item.site, item.flat)
            error = float((in_terms(item.site, restored) - exact).square().sum())
            energy = float(exact.square().sum())
            return restored, error / energy if energy > 0 else 0.0
        return item.flat, 0.0

    def _decoded(
        self, flat: Tensor, cols: int, codec: Codec, bits: int, widths: tuple[int, ...]
    ) -> Iterator[Tensor]:
        layout = codec.layout(flat.numel(), cols, bits)
        pages = max(1, layout.pages(bits))
        memory = torch.empty(pages * PAGE_BYTES, dtype=torch.uint8, device=self._device)
        space = PageSpace(1 << (pages - 1).bit_length(), [memory], array("q", [memory.data_ptr()]))
        table = array("i", range(layout.pages(bits)))
        if self._backend.encode(flat, layout, bits, table, space):
            for width in widths:
                out = torch.empty_like(flat)
                self._backend.decode(out, layout, width, table[: layout.pages(width)], space)
                yield out


def candidate_codecs(site: SaveSite, flat: Tensor, cols: int) -> list[Codec]:
    """Codecs worth measuring for a tensor of ``cols`` columns."""
    granularities = [Granularity.GROUP, Granularity.TENSOR]
    rows = flat.numel() // cols
    if cols >= 32:
        granularities.append(Granularity.TOKEN)
    if rows >= 32 and cols > 1:
        granularities.append(Granularity.CHANNEL)
    books = ["uniform", "normal"]
    if float(flat.min()) >= 0:
        books.append("root")
    codecs = [Codec(granularity, book) for granularity in granularities for book in books]
    if reads_gelu_slope(site):
        codecs.append(GELU)
    return codecs


def in_terms(site: SaveSite, flat: Tensor) -> Tensor:
    """The elements in the terms in which their consumer feels an error."""
    values = flat.float()
    return gelu_slope(values) if reads_gelu_slope(site) else values


def reads_gelu_slope(site: SaveSite) -> bool:
    """Whether GELU's backward is the only consumer: then only GELU's derivative matters."""
    return site.consumers == {"GeluBackward0.self"}
