"""Graphs that keep everything, so that any saved tensor can be perturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .backward import PassedOn, below, differences_between, gradients_of, outgoing
from .batches import Inputs, batch_of, scalar_loss
from .checkpointed import repeatable, runs_again
from .derivations import derivation, remember, row_sums
from .expressions import Reader, Source
from .handles import source_of_tensor
from .saved_tensors import Compressor
from .sites import SaveSite
from .tensors import contiguous_stride, geometry, is_contiguous, operation
from .watching import Item, Pass, Saved

NORMALISATIONS = ("NativeLayerNorm", "FusedRmsNorm")
"""Nodes that divide each row of their input by its own size."""

NORMALISED = ("input", "self")
"""Where they keep that input."""

SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)
"""What a loss is multiplied by where fp16 is about, as its small gradients would vanish: the first
of which all gradients are finite, less a step for what is yet to be changed of them."""


class WrittenInPythonError(Exception):
    """A node of the graph cannot be run by itself."""


class ProbeTooLargeError(Exception):
    """The probe's exact tensors would exceed the budget."""


class Graph(Pass):
    """A forward pass with every saved tensor kept, so that any of them can be perturbed.

    To be used in a ``with`` statement: only its end lets the tensors go.

    Args:
        compressor: tells parameters apart and names sites.
        forward: the model's own forward.
        inputs: its arguments.
        limit_bytes: gives what the kept tensors may take at the moment.

    Raises:
        ProbeTooLargeError: when they would take more.

    Attributes:
        items: what each site saved.
        takes_first: a node takes the first of each example's tokens.
        runs_again: there are reentrant checkpoints in it.
        scale: what the loss is multiplied by when gradients are taken.
    """

    def __init__(
        self,
        compressor: Compressor,
        forward: Callable[..., Any],
        inputs: Inputs,
        limit_bytes: Callable[[], float],
    ) -> None:
        super().__init__(compressor, inputs)
        self.batch = batch_of(inputs)
        self.items: dict[SaveSite, list[Item]] = {}
        self._derived: list[Item] = []
        self._limit_bytes = limit_bytes
        self.takes_first = self.runs_again = False
        self._leaves: list[Tensor] = []
        self.scale = 1.0
        self._incoming: dict[Any, tuple[Tensor | None, ...]] = {}
        self._reference: list[Tensor | None] = []
        args, kwargs = inputs
        with self._watching(), repeatable():
            self.loss = scalar_loss(forward(*args, **kwargs), compressor.config.seed)
        self._look()

    def check(self) -> None:
        """Raise `ProbeTooLargeError` where it holds more than it may."""
        if self.nbytes > self._limit_bytes():
            raise ProbeTooLargeError

    def _first(self, item: Item, tensor: Tensor) -> Item:
        self.check()
        if self._follows(item, tensor):
            self._derived.append(item)
        self.items.setdefault(item.site, []).append(item)
        return item

    def _follows(self, item: Item, tensor: Tensor) -> bool:
        """Find what the item follows from, and confirm it by its elements."""
        # What a step could not confirm is stored, and so measured like any other.
        if not self.compressor.config.derive or item.site.doubted:
            return False
        found = derivation(tensor, item.flat.numel(), _source_of)
        sums = row_sums(tensor, found)
        if sums is not None:
            packed, follows = sums
            if not follows.agrees(packed.item.flat, _READER):
                return False
            packed.item.expression = follows
            self._derived.append(packed.item)
        if found is not None and found.agrees(item.flat, _READER):
            item.expression = found
        return item.expression is not None

    def derived_from(self, items: Iterable[Item]) -> list[Item]:
        """These items and all that follow from them, in the order in which they were saved."""
        found = dict.fromkeys(items)
        for item in self._derived:
            if not found.keys().isdisjoint(item.sources()):
                found[item] = None
        return list(found)

    def _again(self, known: Item, tensor: Tensor) -> Saved:
        shape, stride = tensor.shape, tensor.stride()
        if not geometry(shape, stride)[2]:  # was copied together
            stride = contiguous_stride(shape)
        saved = Saved(known, shape, stride)
        remember(tensor, saved)
        return saved

    def _unpack(self, saved: Tensor | Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        item = saved.item
        return item.all().as_strided(saved.shape, saved.stride)

    def _look(self) -> None:
        """See what the graph is made of.

        What a checkpoint hides, the graph does not show: any parameter may get a gradient there.
        """
        self._leaves = [p for p in self.compressor.model.parameters() if p.requires_grad]
        for node in _nodes(self.loss):
            self.takes_first |= _takes_first(node)
            self.runs_again |= runs_again(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                self._leaves.append(leaf)

    def find_readers(self) -> None:
        """Tell items and sites which nodes read them: those that hold what was packed for them.

        Nothing is unpacked: what others' hooks hold might be computed again for it.
        """
        normalising = {found for node in _nodes(self.loss) for found in _normalising(node)}
        for node in _nodes(self.loss):
            for slot, packed in _packed_for(node):
                site = packed.item.site
                packed.item.readers.add(node)
                site.consumers.add(f"{node.name()}.{slot}")
                site.normalised |= node in normalising and slot in NORMALISED
        # Who reads what is derived reads, in effect, what it is derived from.
        for item in reversed(self._derived):
            for source in item.sources():
                source.site.consumers |= item.site.consumers

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *error: object) -> None:
        # The graph's nodes hold our hooks and items, and we and the items hold the nodes: cycles
        # through C++, which the collector does not see.
        del self.loss
        for items in self.items.values():
            for item in items:
                item.readers.clear()
                item.expression = item.edge = None
        self._derived.clear()
        self.items.clear()
        self._known.clear()
        self._incoming.clear()
        self._leaves.clear()

    def gradients(self, parameters: list[nn.Parameter]) -> list[Tensor | None]:
        """Gradients of the loss times ``scale``.

        The graph is kept, and what flowed into each reader is noted.
        """
        if any(item.flat.dtype is torch.float16 for items in self.items.values() for item in items):
            self._choose_scale(parameters)
        readers = {node for items in self.items.values() for i in items for node in i.readers}
        hooks = [
            node.register_prehook(partial(self._incoming.__setitem__, node)) for node in readers
        ]
        try:
            self._reference = self._gradients_of(parameters)
        finally:
            for hook in hooks:
                hook.remove()
        return self._reference

    def incoming(self, site: SaveSite) -> list[Tensor | None]:
        """What flowed into the readers of the site's items, and of what follows from them."""
        readers = {node for i in self.derived_from(self.items[site]) for node in i.readers}
        return [gradient for node in readers for gradient in self._incoming.get(node, ())]

    def restore(self, site: SaveSite) -> None:
        """Let the site's items, and what follows from them, be read as they are again."""
        for item in self.derived_from(self.items[site]):
            item.restored = None

    def change(self, site: SaveSite, parameters: list[nn.Parameter]) -> list[Tensor | None]:
        """Change of the gradients when the site's items are read as ``restored``.

        What is derived from them is then evaluated from that. A backward pass is linear in the
        gradients that flow through it, so only the change of what the readers give on has to be
        followed, and only below them.
        """
        items = self.derived_from(self.items[site])
        self.evaluate(items)
        try:
            if site.least_bits:
                raise WrittenInPythonError  # a region that is run again reads it
            perturbed = self.passed_on(items)
            with as_saved(items):
                exact = self.passed_on(items)
        except WrittenInPythonError:
            whole = self._gradients_of(parameters)
            return [
                None if a is None or b is None else a - b
                for a, b in zip(whole, self._reference, strict=True)
            ]
        return self.below(differences_between(perturbed, exact), parameters)

    def below(
        self, differences: list[tuple[Any, int, Tensor]], parameters: list[nn.Parameter]
    ) -> list[Tensor | None]:
        """What such differences change of the parameters' gradients."""
        return below(differences, parameters, self._leaves if self.runs_again else None)

    def _choose_scale(self, parameters: list[nn.Parameter]) -> None:
        for self.scale, lower in pairwise(SCALES):
            found = self._gradients_of(parameters)
            if all(g is None or bool(g.isfinite().all()) for g in found):
                self.scale = lower
                return
        self.scale = SCALES[-1]

    def _gradients_of(self, parameters: list[nn.Parameter]) -> list[Tensor | None]:
        incoming = [torch.full_like(self.loss, self.scale)]
        leaves = self._leaves if self.runs_again else None
        return gradients_of([self.loss], parameters, incoming, leaves)

    def evaluate(self, items: Iterable[Item]) -> None:
        """Read what is derived as what follows from what is read."""
        for item in items:
            if item.expression is not None:
                item.restored = item.expression.evaluate(_READER).to(item.flat.dtype)

    def passed_on(self, items: Iterable[Item]) -> list[PassedOn]:
        """What the items' readers pass on.

        Raises:
            WrittenInPythonError: a reader cannot be run by itself.
        """
        nodes = {node: None for i in items for node in i.readers if node in self._incoming}
        if not all(callable(node) for node in nodes):
            raise WrittenInPythonError
        return [
            (function, index, gradient)
            for node in nodes
            for (function, index), gradient in zip(
                node.next_functions, outgoing(node, self._incoming[node]), strict=True
            )
        ]


@contextmanager
def as_saved(items: Iterable[Item]) -> Iterator[None]:
    """Inside, the items are read as they are."""
    restored = [(item, item.restored) for item in items]
    for item, _ in restored:
        item.restored = None
    try:
        yield
    finally:
        for item, value in restored:
            item.restored = value


def _takes_first(node: Any) -> bool:
    """Whether a node takes the first of each example's tokens."""
    return operation(node.name()) == "Select" and node._saved_dim == 1 and node._saved_index == 0


def _normalising(node: Any) -> list[Any]:
    """The nodes that read what a normalisation divides by its size, if this node is part of one.

    RMSNorm written out is ``x * rsqrt(mean(x ** 2) + eps)``: the square is what reads ``x``.
    """
    if operation(node.name()) in NORMALISATIONS:
        return [node]
    if operation(node.name()) != "Rsqrt":
        return []
    while node is not None and operation(node.name()) in ("Rsqrt", "Add", "Mean"):
        node = next((function for function, _ in node.next_functions if function), None)
    return [node] if node is not None and operation(node.name()) in ("Pow", "Mul") else []


def _source_of(packed: Any) -> Source | None:
    """What a packed tensor's elements can be had from, if that can be."""
    if isinstance(packed, Saved):
        row_by_row = is_contiguous(packed.shape, packed.stride)
        return Source(packed.item, tuple(packed.shape), None if row_by_row else packed.stride)
    return source_of_tensor(packed) if isinstance(packed, Tensor) else None


_READER = Reader(lambda source: source.clone() if isinstance(source, Tensor) else source.own())


def _nodes(loss: Tensor) -> Iterator[Any]:
    """The nodes of a loss's graph."""
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(function for function, _ in node.next_functions)
            yield node


def _packed_for(node: Any) -> Iterator[tuple[str, Saved]]:
    """What our hooks packed for a node, with the name of the slot."""
    for name in _raw_slots(type(node)):
        raw = ()
        with suppress(RuntimeError):  # run backward, and freed, in the forward pass
            raw = getattr(node, name)
        for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
            packed = None
            with suppress(RuntimeError):  # saved without hooks
                packed = getattr(saved, "data", None)
            if isinstance(packed, Saved):
                slot = name.removeprefix("_raw_saved_")
                yield ("saved_tensors" if slot == "tensors" else slot), packed


@cache
def _raw_slots(node_type: type) -> list[str]:
    return [name for name in dir(node_type) if name.startswith("_raw_saved_")]
