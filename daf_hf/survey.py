"""A look at a whole batch that keeps nothing: sizes and distortions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .batches import Inputs
from .checkpointed import EXACT_BITS
from .codecs import Codec
from .gauge import Gauge, sample
from .placement import COMPRESSIBLE, SMALLEST_BYTES
from .saved_tensors import Compressor
from .sites import SaveSite
from .tensors import WIDE, is_two_valued, narrowest
from .watching import Item, Pass


@dataclass
class Finding:
    """What a survey found of a site.

    Attributes:
        shape, columns: of the first tensor.
        numel: its elements to store.
        uses: tensors stored in one forward pass; duplicates of others' do not count.
        mean_square, mean_magnitude: of its elements.
        two_valued: it has exactly two values.
        keep, narrow: see :class:`SaveSite`.
        distortions: for each candidate codec, at 0..8 bits.
    """

    shape: tuple[int, ...]
    columns: tuple[int, ...]
    numel: int
    uses: int
    mean_square: float
    mean_magnitude: float
    two_valued: bool
    keep: float | None
    narrow: torch.dtype | None
    distortions: dict[Codec, tuple[float, ...]]


class Survey(Pass):
    """A forward pass of the whole batch that keeps nothing: sizes and distortions as they are.

    Args:
        compressor, forward, inputs: as for :class:`Graph`.
        gauge: measures codecs.
    """

    def __init__(
        self,
        compressor: Compressor,
        forward: Callable[..., Any],
        inputs: Inputs,
        gauge: Gauge,
    ) -> None:
        super().__init__(compressor, inputs)
        self.findings: dict[SaveSite, Finding] = {}
        self._gauge = gauge
        args, kwargs = inputs
        with self._watching():
            forward(*args, **kwargs)

    def _first(self, item: Item, tensor: Tensor) -> bool:
        found = self.findings.get(item.site)
        if found is None:
            found = self.findings[item.site] = self._find(item)
        else:
            found.uses += 1
        if found.two_valued:
            self.compressor.draws.note()
        return True

    def _again(self, known: bool, tensor: Tensor) -> None:
        return None

    def _unpack(self, saved: None) -> Tensor:
        raise RuntimeError("a survey keeps nothing; its graph cannot be run backward")

    def _find(self, item: Item) -> Finding:
        flat = item.flat
        values = sample(item.kept(), item.cols)[0].float()
        empty = not flat.numel()
        finding = Finding(
            item.shape,
            item.columns,
            flat.numel(),
            1,
            0.0 if empty else float(values.square().mean()),
            0.0 if empty else float(values.abs().mean()),
            False,
            None,
            None,
            {},
        )
        if flat.nbytes >= SMALLEST_BYTES and item.site.compressible:
            may_be_encoded = flat.dtype in COMPRESSIBLE or flat.dtype is torch.bool
            finding.two_valued = may_be_encoded and is_two_valued(flat)
            finding.narrow = narrowest(flat) if flat.dtype in WIDE else None
            derived = item.site.derived
            if finding.two_valued:
                finding.keep = self.compressor.draws.learn(flat)
            lossy = flat.dtype in COMPRESSIBLE and item.site.least_bits < EXACT_BITS
            if not finding.two_valued and not derived and lossy:
                finding.distortions = self._gauge.distortions(item)
        return finding
