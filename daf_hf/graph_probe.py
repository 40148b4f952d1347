"""What calibration offers to a metric: measurements on one graph, site by site."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .codecs import Codec
from .gauge import Gauge
from .gradient_error import GradientError, squared_norm
from .probing import Graph
from .rounding import rounded_at_random
from .sites import SaveSite


class GraphProbe:
    """A :class:`daf_hf.importance.Probe` on a graph that is alive.

    A measurement leaves its site as it restored it, for another one to read; the caller puts that
    right (:meth:`Graph.restore`).

    Args:
        graph: its readers are known.
        gauge: restores tensors from their quantized form.
        codecs: of the sites that may be asked for.
        bits: the width at which they are restored.
        errors: tells how far gradients are off.
        reference: the gradients of all that is trained, with every tensor as it was saved.
    """

    def __init__(
        self,
        graph: Graph,
        gauge: Gauge,
        codecs: Mapping[SaveSite, Codec],
        bits: int,
        errors: GradientError,
        reference: list[Tensor | None],
    ) -> None:
        self._graph = graph
        self._gauge = gauge
        self._codecs = codecs
        self._bits = bits
        self._errors = errors
        self._reference = reference

    def distortion(self, site: SaveSite) -> float:
        """See :class:`daf_hf.importance.Probe`."""
        total = energy = 0.0
        for item in self._graph.items[site]:
            item.restored, error = self._gauge.restore(item, self._codecs[site], self._bits)
            weight = float(item.kept().float().square().sum())
            total += error * weight
            energy += weight
        return total / energy if energy > 0 else 0.0

    def gradient_error(self, site: SaveSite) -> float:
        """See :class:`daf_hf.importance.Probe`."""
        if any(item.restored is None for item in self._graph.items[site]):
            self.distortion(site)
        return self._change_of(site)

    def elements(self, site: SaveSite) -> list[Tensor]:
        """See :class:`daf_hf.importance.Probe`."""
        return [item.flat.view(-1, item.cols) for item in self._graph.items[site]]

    def output_gradient_norm(self, site: SaveSite) -> float:
        """See :class:`daf_hf.importance.Probe`."""
        return math.sqrt(squared_norm(self._graph.incoming(site))) / self._graph.scale

    def rounded_gradient(self, site: SaveSite, bits: int, seed: int) -> list[Tensor | None]:
        """See :class:`daf_hf.importance.Probe`."""
        generator = torch.Generator().manual_seed(seed)
        for item in self._graph.items[site]:
            item.restored = rounded_at_random(item.flat, bits, generator)
        try:
            change = self._graph.change(site, self._errors.parameters)
            return [None if c is None else c.float() / self._graph.scale for c in change]
        finally:
            self._graph.restore(site)

    def error_at_zero(self, site: SaveSite) -> float:
        """:meth:`gradient_error` when every element is its unit's mean.

        (Softmax outputs at their mean let the gradient of the values double.)
        """
        codec = min(site.distortions, key=lambda codec: site.distortions[codec][0])
        for item in self._graph.items[site]:
            item.restored, _ = self._gauge.restore(item, codec, 0)
        return self._change_of(site)

    def _change_of(self, site: SaveSite) -> float:
        change = self._graph.change(site, self._errors.parameters)
        return self._errors.of(change, self._reference)
