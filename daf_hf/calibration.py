"""Calibration: who consumes each saved tensor, how codecs distort it, what that does to gradients.

Three kinds of forward pass: a pilot of a few tokens, to label consumers and learn how sizes follow
the batch; a survey of the whole batch that keeps nothing, to measure sizes and distortions; and
graphs of a few examples with everything kept, in which one backward pass a site restores that site
alone from its quantized form. Nothing of the user's is changed: RNG states, gradients, buffers and
parameters are afterwards what they were.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from .batches import Inputs, batch_of, cut
from .codecs import Codec
from .gauge import Gauge
from .importance import resolve_importance
from .probing import Graph, ProbeTooLargeError, Survey
from .saved_tensors import Compressor
from .sites import DIM_CONSTANT, Batch, Probed, SaveSite, dimension_roles

PROBE_BITS = 2
"""Width at which importances are measured; it ranks sites at other widths too."""

NUDGE = 0.01
"""How far parameters that are all zero are moved for the measurement (LoRA's B at the start)."""

PILOT_EXAMPLES = 2
PILOT_SHARE = 3
"""Sixteenths of the tokens that the pilot takes."""

SMALL_SHARE = 0.05
"""Sites below this share of the average site's bytes are not measured."""

SMALLEST_PROBE_TOKENS = 4
SHARE_OF_BUDGET = 0.9
"""Of the budget, what a graph that keeps everything may take."""


class CalibrationError(Exception):
    """No measurement was possible; says why."""


class Calibration:
    """One calibration: a :class:`daf_hf.importance.Probe` over a few small graphs.

    Args:
        compressor: whose sites are calibrated.
        forward: the model's own forward.
        inputs: the batch from which the probe is cut.

    Raises:
        CalibrationError: when nothing could be measured.
    """

    def __init__(self, compressor: Compressor, forward: Callable[..., Any], inputs: Inputs) -> None:
        self.compressor = compressor
        self._forward = forward
        self._inputs = inputs
        self._whole = batch_of(inputs)
        self._gauge = Gauge(compressor)
        self._limit = compressor.arena.limit_bytes * SHARE_OF_BUDGET
        self._parameters = [p for p in compressor.model.parameters() if p.requires_grad]
        widths = [b for b in compressor.config.bits if b] or [max(compressor.config.bits)]
        self._bits = min(widths, key=lambda bits: abs(bits - PROBE_BITS))
        self._codecs: dict[SaveSite, Codec] = {}
        self._nbytes: dict[SaveSite, int] = {}
        self._graph: Graph | None = None
        self._reference: list[Tensor | None] = []

    def run(self) -> None:
        """Measure, and write what was found into the sites."""
        with untouched(self.compressor.model, self.compressor.device):
            with self._pilot() as pilot:
                bytes_per_token = pilot.nbytes / (pilot.batch.examples * pilot.batch.tokens)
                pilot.find_readers()
                self._survey(pilot)
                moves = self._moves_off_zero(pilot)
            with _moved(moves):
                self._measure(bytes_per_token)
        for site in self.compressor.tracker.sites.values():
            site.known = True

    # Sizes and distortions ---------------------------------------------------------------------

    def _build(self, start: int, size: Batch) -> Graph:
        inputs = cut(self._inputs, start, size)
        return Graph(self.compressor, self._forward, inputs, self._limit)

    def _pilot(self) -> Graph:
        """A very small graph: who reads what, and how sizes follow the batch."""
        whole = self._whole
        tokens = min(whole.tokens, max(SMALLEST_PROBE_TOKENS, whole.tokens * PILOT_SHARE // 16))
        size = Batch(min(PILOT_EXAMPLES, whole.examples), tokens)
        try:
            return self._build(0, size)
        except ProbeTooLargeError:
            raise CalibrationError(
                f"even {size.examples} examples of {size.tokens} tokens, held exactly, exceed "
                "the budget"
            ) from None

    def _survey(self, pilot: Graph) -> None:
        survey = Survey(self.compressor, self._forward, self._inputs, self._gauge)
        for site, found in survey.findings.items():
            roles = (DIM_CONSTANT,) * len(found.shape)
            if site in pilot.items:
                small = pilot.items[site][0].shape
                roles = dimension_roles(small, found.shape, (pilot.batch, self._whole))
            site.probed = Probed(
                self._whole,
                found.shape,
                roles,
                found.numel,
                found.column,
                found.uses,
                found.mean_square,
                found.mean_magnitude,
            )
            site.two_valued = found.two_valued
            site.distortions = found.distortions
            if found.distortions:
                self._nbytes[site] = found.numel * found.uses * site.dtype.itemsize
                self._codecs[site] = min(
                    found.distortions, key=lambda codec: found.distortions[codec][self._bits]
                )

    # Importances -------------------------------------------------------------------------------

    def _measure(self, bytes_per_token: float) -> None:
        """Probe as many examples as asked for, in graphs that fit the budget."""
        whole = self._whole
        examples = min(self.compressor.config.calibration_batch, whole.examples)
        # Attention grows with the square of the tokens, so a linear guess is on the low side.
        per_example = 1.2 * bytes_per_token * whole.tokens
        size = Batch(min(examples, int(min(self._limit / per_example, examples))), whole.tokens)
        if not size.examples:
            fitting = int(whole.tokens * self._limit / per_example)
            size = Batch(1, max(SMALLEST_PROBE_TOKENS, fitting))
        while True:
            try:
                self._measure_at(size, examples)
                return
            except ProbeTooLargeError:
                if size.examples > 1:
                    size = Batch(size.examples // 2, size.tokens)
                elif size.tokens > SMALLEST_PROBE_TOKENS:
                    size = Batch(1, size.tokens // 2)
                else:
                    raise CalibrationError(
                        "one example, held exactly, exceeds the budget"
                    ) from None

    def _measure_at(self, size: Batch, examples: int) -> None:
        weighted: dict[SaveSite, float] = {}
        weights = 0.0
        metric = resolve_importance(self.compressor.config.importance)
        for start in range(0, examples, size.examples):
            count = min(size.examples, examples - start)
            with self._build(start, Batch(count, size.tokens)) as graph:
                graph.find_readers()
                self._graph = graph
                self._reference = graph.gradients(self._parameters)
                weight = _square(self._reference)
                if not math.isfinite(weight):
                    raise CalibrationError("the probe's gradients are not finite")
                weights += weight
                for site in self._large_sites():
                    if site in graph.items:
                        value = float(metric(site, self))
                        weighted[site] = weighted.get(site, 0.0) + weight * value
                        for item in graph.items[site]:
                            item.restored = None
        for site, total in weighted.items():
            measured = total / weights if weights > 0 else 0.0
            if not math.isfinite(measured) or measured < 0:
                raise CalibrationError(
                    f"importance metric {self.compressor.config.importance!r} gave {measured} for "
                    f"{site.name}; it must be finite and not negative"
                )
            old = site.importance
            site.importance = measured if old is None else (old + measured) / 2
        dearest = max((s.importance or 0.0 for s in weighted), default=0.0)
        for site in self._codecs.keys() - weighted.keys():
            site.importance = dearest

    def _large_sites(self) -> list[SaveSite]:
        """The sites worth a backward pass each.

        The many small ones (statistics of normalisations, LoRA's inner activations) are taken to
        be as dear as the dearest: they then get many bits, which costs next to nothing.
        """
        average = sum(self._nbytes.values()) / max(1, len(self._nbytes))
        return [site for site, size in self._nbytes.items() if size >= SMALL_SHARE * average]

    def distortion(self, site: SaveSite) -> float:
        """See :class:`daf_hf.importance.Probe`."""
        assert self._graph is not None
        total = energy = 0.0
        for item in self._graph.items[site]:
            item.restored, error = self._gauge.restore(item, self._codecs[site], self._bits)
            weight = float(item.flat.float().square().sum())
            total += error * weight
            energy += weight
        return total / energy if energy > 0 else 0.0

    def gradient_error(self, site: SaveSite) -> float:
        """See :class:`daf_hf.importance.Probe`."""
        assert self._graph is not None
        norm = _square(self._reference)
        if any(item.restored is None for item in self._graph.items[site]):
            self.distortion(site)
        change = self._graph.change(site, self._parameters)
        return _square(change) / norm if norm > 0 else 0.0

    def _moves_off_zero(self, pilot: Graph) -> dict[nn.Parameter, Tensor]:
        """For parameters that are all zero, one signed gradient step.

        While LoRA's B is zero, A has no gradient and every input of A looks free. Adam's first
        steps move B by about the learning rate times the gradient's sign; so does this.
        """
        zero = [p for p in self._parameters if not p.is_meta and not bool(p.any())]
        gradients = pilot.gradients(zero) if zero else []
        return {
            parameter: -NUDGE * gradient.sign()
            for parameter, gradient in zip(zero, gradients, strict=True)
            if gradient is not None
        }


@contextmanager
def _moved(moves: dict[nn.Parameter, Tensor]) -> Iterator[None]:
    """Inside, the parameters have these values; afterwards, bit for bit their own."""
    before = [parameter.detach().clone() for parameter in moves]
    try:
        with torch.no_grad(), _unversioned(list(moves)):
            for parameter, value in moves.items():
                parameter.copy_(value)
        yield
    finally:
        with torch.no_grad(), _unversioned(list(moves)):
            for parameter, value in zip(moves, before, strict=True):
                parameter.copy_(value)
        # Autocast may have cached low-precision copies of the moved parameters.
        torch.clear_autocast_cache()


def _square(tensors: list[Tensor | None]) -> float:
    return sum(float(t.float().square().sum()) for t in tensors if t is not None)


@contextmanager
def _unversioned(tensors: Sequence[Tensor]) -> Iterator[None]:
    """In-place changes inside do not count as such for graphs that are alive."""
    with _unsafe_preserve_version_counter(tuple(tensors)):
        yield


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """RNG states (torch, numpy, Python) and buffers are afterwards what they were."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device.index or 0]
    kind = "cuda" if device.type == "cpu" else device.type
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with (
            torch.random.fork_rng(devices, device_type=kind),
            _unversioned([buffer for _, _, buffer, _ in buffers]),
        ):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, name, buffer, before in buffers:
            module._buffers[name] = buffer
            if not torch.equal(buffer, before):
                with torch.no_grad(), _unversioned([buffer]):
                    buffer.copy_(before)
