"""Calibration: who consumes each saved tensor, how codecs distort it, what that does to gradients.

One forward pass of a few examples whose saved tensors are all kept exactly; then one backward
pass a site, in which that site alone is restored from its quantized form. Nothing of the user's
is changed: RNG states, gradients, buffers and parameters are afterwards what they were.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .batches import Inputs, batch_of, cut, scalar_loss
from .codecs import GELU, Codec, gelu_slope
from .handles import flatten
from .hook_stack import pop_hooks, push_hooks
from .importance import resolve_importance
from .kernels.format import PAGE_BYTES, Granularity, PageSpace
from .saved_tensors import COMPRESSIBLE, SMALLEST_BYTES, Compressor, columns, geometry, is_ordinary
from .sites import DIM_CONSTANT, Batch, Probed, SaveSite, dimension_roles

logger = logging.getLogger("daf_hf")

PROBE_BITS = 2
"""Width at which importances are measured; it ranks sites at other widths too."""

SAMPLE = 1 << 16
"""Elements on which a codec's distortion is measured."""

NUDGE = 0.01
"""How far parameters that are all zero are moved for the measurement (LoRA's B at the start)."""

PILOT_SHARE = 3
"""Sixteenths of the tokens that the first pilot takes."""

SHARE_OF_BUDGET = 0.9
SMALLEST_PROBE_TOKENS = 4


class ProbeTooLargeError(Exception):
    """The probe's exact tensors would exceed the budget."""


class CalibrationError(Exception):
    """No measurement was possible; says why."""


@dataclass(eq=False)
class _Item:
    """Elements that the probe's graph saved, held exactly."""

    site: SaveSite
    flat: Tensor
    shape: tuple[int, ...]
    column: int
    restored: Tensor | None = None


@dataclass(eq=False)
class _Saved:
    item: _Item
    shape: torch.Size
    stride: tuple[int, ...]


class Graph:
    """One forward pass with every saved tensor kept, so that any of them can be perturbed.

    Args:
        compressor: tells parameters apart and names sites.
        forward: the model's own forward.
        inputs: its arguments.
        limit_bytes: what the kept tensors may take.

    Raises:
        ProbeTooLargeError: when they would take more.
    """

    def __init__(
        self,
        compressor: Compressor,
        forward: Callable[..., Any],
        inputs: Inputs,
        limit_bytes: float,
    ) -> None:
        self.compressor = compressor
        self.batch = batch_of(inputs)
        self.items: dict[SaveSite, list[_Item]] = {}
        self.nbytes = 0
        self._limit = limit_bytes
        self._known: dict[tuple[Any, ...], _Item] = {}
        self._storages: set[int] = set()
        self._reader: str | None = None
        hooks = (self._pack, self._unpack)
        calls = compressor.tracker.start()
        push_hooks(hooks)
        try:
            args, kwargs = inputs
            self.loss = scalar_loss(forward(*args, **kwargs), compressor.config.seed)
        finally:
            pop_hooks(hooks)
            compressor.tracker.finish(calls)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        if not is_ordinary(tensor):
            return tensor.detach()
        storage = tensor.untyped_storage()
        compressor = self.compressor
        if compressor.is_parameter(storage):
            return tensor.detach()
        if compressor.recast_of(tensor) is not None:
            return tensor.detach()
        site = compressor.tracker.site(sys._getframe(1), type(tensor.grad_fn))
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self.nbytes += storage.nbytes()
            if self.nbytes > self._limit:
                raise ProbeTooLargeError
        return self._keep(tensor, site, storage._cdata)

    def _keep(self, tensor: Tensor, site: SaveSite, cdata: int) -> _Saved:
        shape, stride = tensor.shape, tensor.stride()
        extent, column, whole = geometry(shape, stride)
        key = (cdata, tensor.storage_offset(), tensor.dtype, tensor._version, extent)
        if not whole:
            tensor = tensor.detach().contiguous()
            key, stride = (*key, shape, stride), tensor.stride()
            extent, column, _ = geometry(shape, stride)
        item = self._known.get(key)
        if item is None:
            item = _Item(site, flatten(tensor, extent), tuple(shape), column)
            self._known[key] = item
            self.items.setdefault(site, []).append(item)
        return _Saved(item, shape, stride)

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        item = saved.item
        if self._reader is not None:
            item.site.consumers.add(self._reader)
        flat = item.flat if item.restored is None else item.restored
        return flat.as_strided(saved.shape, saved.stride)

    def label_consumers(self) -> None:
        """Tell each site which nodes and slots read its tensors, by reading every slot once."""
        seen: set[Any] = set()
        waiting = [self.loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting.extend(function for function, _ in node.next_functions)
            for slot in _saved_slots(type(node)):
                self._reader = f"{node.name()}.{slot.removeprefix('_saved_')}"
                try:
                    getattr(node, slot)
                finally:
                    self._reader = None

    def gradients(self, parameters: list[nn.Parameter]) -> list[Tensor | None]:
        """Gradients of the loss; the graph is kept."""
        return list(
            torch.autograd.grad(self.loss, parameters, retain_graph=True, allow_unused=True)
        )


def _saved_slots(node_type: type) -> list[str]:
    slots = [name for name in dir(node_type) if name.startswith("_saved_")]
    return slots or (["saved_tensors"] if hasattr(node_type, "saved_tensors") else [])


class Codecs:
    """Measures codecs on tensors with the compressor's own kernels."""

    def __init__(self, compressor: Compressor) -> None:
        self._backend = compressor.backend
        self._device = compressor.arena.device

    def round_trip(self, flat: Tensor, cols: int, codec: Codec, bits: int) -> Tensor | None:
        """``flat`` encoded and decoded; None when the codec cannot represent it."""
        return next(iter(self._decoded(flat, cols, codec, bits, (bits,))), None)

    def distortions(
        self, flat: Tensor, cols: int, codec: Codec, terms: Callable[[Tensor], Tensor]
    ) -> tuple[float, ...] | None:
        """Squared error relative to energy at 0..8 bits, both in ``terms`` of the elements."""
        exact = terms(flat.float())
        energy = float(exact.square().sum())
        if not energy > 0 or not math.isfinite(energy):
            return None
        errors: list[float] = []
        for bits, widths in ((0, (0,)), (4, (1, 2, 3, 4)), (8, (5, 6, 7, 8))):
            for restored in self._decoded(flat, cols, codec, bits, widths):
                error = float((terms(restored.float()) - exact).square().sum()) / energy
                errors.append(error)
        return tuple(errors) if len(errors) == 9 else None

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


def reads_gelu_slope(site: SaveSite) -> bool:
    """Whether GELU's backward is the only consumer: then only GELU's derivative matters."""
    return site.consumers == {"GeluBackward0.self"}


def sample_rows(flat: Tensor, cols: int) -> Tensor:
    """At most about ``SAMPLE`` elements: evenly spaced whole rows."""
    rows = flat.numel() // cols
    wanted = max(32, SAMPLE // cols)
    if rows <= wanted:
        return flat
    return flat.view(rows, cols)[:: rows // wanted][:wanted].reshape(-1)


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
        self._codecs = Codecs(compressor)
        self._parameters = [p for p in compressor.model.parameters() if p.requires_grad]
        widths = [b for b in compressor.config.bits if b] or [max(compressor.config.bits)]
        self._bits = min(widths, key=lambda bits: abs(bits - PROBE_BITS))
        self._roles: dict[SaveSite, tuple[int, ...]] = {}
        self._graph: Graph | None = None
        self._reference: list[Tensor | None] = []
        self._best: dict[SaveSite, Codec] = {}

    def run(self) -> None:
        """Measure, and write what was found into the sites."""
        with untouched(self.compressor.model, self.compressor.device):
            pilot = self._pilot()
            with self._moved_off_zero(pilot):
                self._measure(pilot.nbytes / (pilot.batch.examples * pilot.batch.tokens))
        for site in self.compressor.tracker.sites.values():
            site.known = True

    # Sizes -------------------------------------------------------------------------------------

    def _build(self, start: int, size: Batch) -> Graph:
        limit = self.compressor.arena.limit_bytes * SHARE_OF_BUDGET
        inputs = cut(self._inputs, start, size)
        return Graph(self.compressor, self._forward, inputs, limit)

    def _pilot(self) -> Graph:
        """Two very small graphs, to learn how sizes follow the batch; returns the first."""
        whole = batch_of(self._inputs)
        tokens = max(SMALLEST_PROBE_TOKENS, whole.tokens * PILOT_SHARE // 16)
        sizes = [
            Batch(min(examples, whole.examples), min(count, whole.tokens))
            for examples, count in ((2, tokens), (3, tokens * 5 // 3))
        ]
        if whole.examples == 2:  # 2 and 3 would both be cut to 2
            sizes[1] = Batch(1, sizes[1].tokens)
        try:
            pilot, other = (self._build(0, size) for size in sizes)
        except ProbeTooLargeError:
            raise CalibrationError(
                f"even {sizes[0].examples} examples of {sizes[0].tokens} tokens, held exactly, "
                "exceed the budget"
            ) from None
        self._roles = {
            site: dimension_roles(
                items[0].shape, other.items[site][0].shape, (pilot.batch, other.batch)
            )
            for site, items in pilot.items.items()
            if site in other.items
        }
        return pilot

    def _examples(self, whole: Batch) -> int:
        return min(self.compressor.config.calibration_batch, whole.examples)

    def _measure(self, bytes_per_token: float) -> None:
        """Probe as many examples as asked for, in graphs that fit the budget."""
        whole = batch_of(self._inputs)
        examples = self._examples(whole)
        limit = self.compressor.arena.limit_bytes * SHARE_OF_BUDGET
        # Attention grows with the square of the tokens, so a linear guess is on the low side.
        per_example = 1.2 * bytes_per_token * whole.tokens
        size = Batch(min(examples, int(limit / per_example)), whole.tokens)
        if not size.examples:
            size = Batch(1, max(SMALLEST_PROBE_TOKENS, int(whole.tokens * limit / per_example)))
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
        errors: dict[SaveSite, float] = {}
        norm = 0.0
        metric = resolve_importance(self.compressor.config.importance)
        for start in range(0, examples, size.examples):
            count = min(size.examples, examples - start)
            self._graph = graph = self._build(start, Batch(count, size.tokens))
            if not start:
                graph.label_consumers()
                self._describe(graph)
            self._reference = graph.gradients(self._parameters)
            weight = _square(self._reference)
            if not math.isfinite(weight):
                raise CalibrationError("the probe's gradients are not finite")
            norm += weight
            for site in self._best:
                if site in graph.items:
                    errors[site] = errors.get(site, 0.0) + weight * float(metric(site, self))
            self._graph = None
        for site, total in errors.items():
            measured = total / norm if norm > 0 else 0.0
            if not math.isfinite(measured) or measured < 0:
                raise CalibrationError(
                    f"importance metric {self.compressor.config.importance!r} gave {measured} for "
                    f"{site.name}; it must be finite and not negative"
                )
            old = site.importance
            site.importance = measured if old is None else (old + measured) / 2

    def _describe(self, graph: Graph) -> None:
        """Sizes, distortions and best codecs of every site."""
        whole = batch_of(self._inputs)
        wider = whole.examples * whole.tokens / (graph.batch.examples * graph.batch.tokens)
        for site, items in graph.items.items():
            item = items[0]
            roles = self._roles.get(site, (DIM_CONSTANT,) * len(item.shape))
            values = item.flat.float()
            site.probed = Probed(
                graph.batch,
                item.shape,
                roles,
                item.flat.numel(),
                item.column,
                len(items),
                float(values.square().mean()) if values.numel() else 0.0,
                float(values.abs().mean()) if values.numel() else 0.0,
            )
            site.shape, site.dtype = item.shape, item.flat.dtype
            site.two_valued, site.distortions = False, {}
            if item.flat.nbytes * wider >= SMALLEST_BYTES and site.compressible:
                site.two_valued = _is_two_valued(item.flat)
                if not site.two_valued and item.flat.dtype in COMPRESSIBLE:
                    self._distort(site, item)

    def _distort(self, site: SaveSite, item: _Item) -> None:
        cols = columns(item.shape, item.column, item.flat.numel())
        flat = sample_rows(item.flat, cols)
        terms = gelu_slope if reads_gelu_slope(site) else lambda values: values
        for codec in candidate_codecs(site, flat, cols):
            errors = self._codecs.distortions(flat, cols, codec, terms)
            if errors is not None:
                site.distortions[codec] = errors
        if site.distortions:
            self._best[site] = min(
                site.distortions, key=lambda codec: site.distortions[codec][self._bits]
            )

    # The metrics' view -------------------------------------------------------------------------

    def distortion(self, site: SaveSite) -> float:
        """See :class:`daf_hf.importance.Probe`."""
        return site.distortions[self._best[site]][self._bits]

    def gradient_error(self, site: SaveSite) -> float:
        """See :class:`daf_hf.importance.Probe`."""
        graph = self._graph
        assert graph is not None
        norm = _square(self._reference)
        items = graph.items[site]
        try:
            for item in items:
                cols = columns(item.shape, item.column, item.flat.numel())
                item.restored = self._codecs.round_trip(
                    item.flat, cols, self._best[site], self._bits
                )
            perturbed = graph.gradients(self._parameters)
        finally:
            for item in items:
                item.restored = None
        change = [
            None if a is None or b is None else a - b
            for a, b in zip(perturbed, self._reference, strict=True)
        ]
        return _square(change) / norm if norm > 0 else 0.0

    @contextmanager
    def _moved_off_zero(self, pilot: Graph) -> Iterator[None]:
        """Move parameters that are all zero by one signed gradient step, and back afterwards.

        While LoRA's B is zero, A has no gradient and every input of A looks free. Adam's first
        steps move B by about the learning rate times the gradient's sign; so does this.
        """
        zero = [p for p in self._parameters if not p.is_meta and not bool(p.any())]
        gradients = torch.autograd.grad(pilot.loss, zero, allow_unused=True) if zero else ()
        del pilot.loss
        try:
            with torch.no_grad(), _unversioned(zero):
                for parameter, gradient in zip(zero, gradients, strict=True):
                    if gradient is not None:
                        parameter.copy_(-NUDGE * gradient.sign())
            yield
        finally:
            with torch.no_grad(), _unversioned(zero):
                for parameter in zero:
                    parameter.zero_()
            # Autocast may have cached low-precision copies of the moved parameters.
            torch.clear_autocast_cache()


def _square(tensors: list[Tensor | None]) -> float:
    return sum(float(t.float().square().sum()) for t in tensors if t is not None)


def _is_two_valued(flat: Tensor) -> bool:
    """Exactly two values (a constant may just not have shown its other value yet)."""
    others = flat[flat != flat[0]]
    return others.numel() > 0 and bool((others == others[0]).all())


@contextmanager
def _unversioned(tensors: list[nn.Parameter]) -> Iterator[None]:
    """In-place changes inside do not count as such for graphs that are alive."""
    with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
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
        with torch.random.fork_rng(devices, device_type=kind):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, name, buffer, before in buffers:
            module._buffers[name] = buffer
            if not torch.equal(buffer, before):
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter((buffer,)):
                    buffer.copy_(before)
