"""Looking at what a model saves: graphs that keep everything, and surveys that keep nothing."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef

from .batches import Inputs, batch_of, scalar_loss
from .codecs import Codec
from .derivations import derivation, remember
from .expressions import Expression, Reader, Source
from .gauge import Gauge, sample
from .hook_stack import pop_hooks, push_hooks
from .placement import COMPRESSIBLE, SMALLEST_BYTES
from .rows import Rows, spread, take
from .saved_tensors import Compressor
from .sites import Live, SaveSite
from .tensors import (
    columns,
    contiguous_stride,
    flatten,
    geometry,
    is_contiguous,
    is_ordinary,
    is_two_valued,
    operation,
)

WATCHES_TRIED = 4
"""Sites whose gradients are looked at, for one that can be watched."""


class _WrittenInPythonError(Exception):
    """A node of the graph cannot be run by itself."""


class ProbeTooLargeError(Exception):
    """The probe's exact tensors would exceed the budget."""


@dataclass(eq=False)
class Item:
    """Elements that a forward pass saved: a flat tensor, and the shape that was saved.

    Attributes:
        site: the save site that stored them first.
        flat: the elements, as they lie in memory.
        shape, stride, column: of the saved tensor; the dimension whose neighbours are adjacent
            (-1: none).
        edge: where the gradient of the saved tensor arrives; None where there is none, or the
            tensor does not lie row by row.
        picked: ``bool [rows]``, which rows are read; None where all are.
        restored: what a perturbed backward pass reads instead.
        readers: the autograd nodes that read it.
        expression: how the elements follow from other items, if they do.
    """

    site: SaveSite
    flat: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    column: int
    edge: GradientEdge | None = None
    picked: Tensor | None = None
    restored: Tensor | None = None
    readers: set[Any] = field(default_factory=set)
    expression: Expression | None = None

    @property
    def cols(self) -> int:
        """Columns of the elements."""
        return columns(self.shape, self.column, self.kept().numel())

    def kept(self) -> Tensor:
        """The elements that are stored, flat."""
        return self.flat if self.picked is None else take(self.flat, self.picked)

    def spread(self, kept: Tensor) -> Tensor:
        """All elements, of those that are stored: zeros for the others."""
        if self.picked is None:
            return kept
        return spread(kept, self.picked, torch.empty_like(self.flat))

    @property
    def operations(self) -> int:
        """Passes over the elements that it takes to restore what is derived."""
        return self.expression.operations if self.expression is not None else 0

    def sources(self) -> list[Item]:
        """The items that it follows from."""
        found = self.expression.sources() if self.expression is not None else ()
        return [source for source in found if isinstance(source, Item)]

    def own(self) -> Tensor:
        """The elements, or what is read instead, in memory that the caller may change."""
        return (self.flat if self.restored is None else self.restored).clone()


@dataclass(eq=False)
class _Saved:
    item: Item
    shape: torch.Size
    stride: tuple[int, ...]


class _Pass(ABC):
    """A forward pass under hooks that see each saved tensor once, with its site.

    Parameters, their low-precision copies and tensors that are not understood stay out of it.

    Attributes:
        nbytes: unique bytes of what was seen.
        copied_bytes: of the low-precision copies.
    """

    def __init__(self, compressor: Compressor, inputs: Inputs) -> None:
        self.compressor = compressor
        self.rows = Rows(inputs) if compressor.config.skip_padding else None
        self.nbytes = self.copied_bytes = 0
        self._storages: dict[int, StorageWeakRef] = {}
        self._known: dict[tuple[Any, ...], Any] = {}

    @contextmanager
    def _watching(self) -> Iterator[None]:
        hooks = (self._pack, self._unpack)
        calls = self.compressor.tracker.start()
        push_hooks(hooks)
        try:
            yield
        finally:
            pop_hooks(hooks)
            self.compressor.tracker.finish(calls)

    def _pack(self, tensor: Tensor) -> Any:
        original, compressor = tensor, self.compressor
        if not is_ordinary(tensor):
            return tensor.detach()
        storage = tensor.untyped_storage()
        if compressor.is_parameter(tensor, storage):
            return tensor.detach()
        if compressor.recast_of(tensor) is not None:
            self.copied_bytes += self._first_seen(storage)
            return tensor.detach()
        site = compressor.tracker.site(sys._getframe(1), type(tensor.grad_fn))
        site.shape, site.dtype = tensor.shape, tensor.dtype
        self.nbytes += self._first_seen(storage)
        shape, stride = tensor.shape, tensor.stride()
        extent, column, whole = geometry(shape, stride)
        version = -1 if tensor.is_inference() else tensor._version
        key = (storage._cdata, tensor.storage_offset(), tensor.dtype, version, extent)
        if not whole:
            tensor = tensor.detach().contiguous()
            key, stride = (*key, shape, stride), tensor.stride()
            extent, column, _ = geometry(shape, stride)
        if key not in self._known:
            item = Item(
                site,
                flatten(tensor, extent),
                tuple(shape),
                stride,
                column,
            )
            if original.grad_fn is not None and original.is_contiguous():
                item.edge = GradientEdge(original.grad_fn, original.output_nr)
            item.picked = self._picked(item, site.live)
            self._known[key] = self._first(item, tensor)
        return self._again(self._known[key], original)

    def _picked(self, item: Item, live: Live) -> Tensor | None:
        """Which rows of the elements are of tokens of this kind; None for all."""
        probed = item.site.probed
        if self.rows is None or probed is None or not item.flat.numel():
            return None
        return self.rows.of(live, item.shape, item.stride, probed.roles)

    def _first_seen(self, storage: torch.UntypedStorage) -> int:
        """Bytes of a storage that was not seen before in this pass, else 0."""
        if storage._cdata in self._storages:
            return 0
        # While the weak reference lives, no other storage can have the same address.
        self._storages[storage._cdata] = StorageWeakRef(storage)
        return storage.nbytes()

    @abstractmethod
    def _first(self, item: Item, tensor: Tensor) -> Any:
        """Elements that were not seen before in this pass, of this tensor."""

    @abstractmethod
    def _again(self, known: Any, tensor: Tensor) -> Any:
        """What autograd keeps for a tensor of these elements."""

    @abstractmethod
    def _unpack(self, saved: Any) -> Tensor: ...


class Graph(_Pass):
    """A forward pass with every saved tensor kept, so that any of them can be perturbed.

    To be used in a ``with`` statement: only its end lets the tensors go.

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
        super().__init__(compressor, inputs)
        self.batch = batch_of(inputs)
        self.items: dict[SaveSite, list[Item]] = {}
        self._derived: list[Item] = []
        self._limit = limit_bytes
        self._reader: tuple[Any, str] | None = None
        self._takes_first = False
        self._incoming: dict[Any, tuple[Tensor | None, ...]] = {}
        self._reference: list[Tensor | None] = []
        args, kwargs = inputs
        with self._watching():
            self.loss = scalar_loss(forward(*args, **kwargs), compressor.config.seed)

    def _first(self, item: Item, tensor: Tensor) -> Item:
        if self.nbytes > self._limit:
            raise ProbeTooLargeError
        if self._follows(item, tensor):
            self._derived.append(item)
        self.items.setdefault(item.site, []).append(item)
        return item

    def _follows(self, item: Item, tensor: Tensor) -> bool:
        """Find what the item follows from, and confirm it by its elements."""
        flat = item.flat
        item.expression = derivation(tensor, flat.numel(), _source_of)
        if item.expression is not None and not item.expression.agrees(flat, _READER):
            item.expression = None
        return item.expression is not None

    def _derived_from(self, items: Iterable[Item]) -> list[Item]:
        """These items and all that follow from them, in the order in which they were saved."""
        found = dict.fromkeys(items)
        for item in self._derived:
            if not found.keys().isdisjoint(item.sources()):
                found[item] = None
        return list(found)

    def _again(self, known: Item, tensor: Tensor) -> _Saved:
        shape, stride = tensor.shape, tensor.stride()
        if not geometry(shape, stride)[2]:  # was copied together
            stride = contiguous_stride(shape)
        saved = _Saved(known, shape, stride)
        remember(tensor, saved)
        return saved

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        item = saved.item
        if self._reader is not None:
            node, label = self._reader
            item.readers.add(node)
            item.site.consumers.add(label)
        flat = item.flat if item.restored is None else item.restored
        return flat.as_strided(saved.shape, saved.stride)

    def find_readers(self) -> None:
        """Tell items and sites which nodes read them, by reading every slot once."""
        seen: set[Any] = set()
        waiting = [self.loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting.extend(function for function, _ in node.next_functions)
            self._takes_first |= _takes_first(node)
            for slot in _saved_slots(type(node)):
                self._reader = node, f"{node.name()}.{slot.removeprefix('_saved_')}"
                try:
                    with suppress(RuntimeError):  # run backward, and freed, in the forward pass
                        getattr(node, slot)
                finally:
                    self._reader = None
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

    def gradients(self, parameters: list[nn.Parameter]) -> list[Tensor | None]:
        """Gradients of the loss; the graph is kept, and what flowed into each reader is noted."""
        readers = {node for items in self.items.values() for i in items for node in i.readers}
        hooks = [
            node.register_prehook(partial(self._incoming.__setitem__, node)) for node in readers
        ]
        try:
            self._reference = _gradients([self.loss], parameters, None)
        finally:
            for hook in hooks:
                hook.remove()
        return self._reference

    def incoming(self, site: SaveSite) -> list[Tensor | None]:
        """What flowed into the readers of the site's items, and of what follows from them."""
        readers = {node for i in self._derived_from(self.items[site]) for node in i.readers}
        return [gradient for node in readers for gradient in self._incoming.get(node, ())]

    def restore(self, site: SaveSite) -> None:
        """Let the site's items, and what follows from them, be read as they are again."""
        for item in self._derived_from(self.items[site]):
            item.restored = None

    def change(self, site: SaveSite, parameters: list[nn.Parameter]) -> list[Tensor | None]:
        """Change of the gradients when the site's items are read as ``restored``.

        What is derived from them is then evaluated from that. A backward pass is linear in the
        gradients that flow through it, so only the change of what the readers give on has to be
        followed, and only below them.
        """
        items = self._derived_from(self.items[site])
        self._evaluate(items)
        try:
            perturbed = self._passed_on(items)
            with _as_saved(items):
                exact = self._passed_on(items)
        except _WrittenInPythonError:
            whole = _gradients([self.loss], parameters, None)
            return [
                None if a is None or b is None else a - b
                for a, b in zip(whole, self._reference, strict=True)
            ]
        return _below(_differences(perturbed, exact), parameters)

    def _evaluate(self, items: Iterable[Item]) -> None:
        """Read what is derived as what follows from what is read."""
        for item in items:
            if item.expression is not None:
                item.restored = item.expression.evaluate(_READER).to(item.flat.dtype)

    def _passed_on(self, items: Iterable[Item]) -> list[_PassedOn]:
        """What the items' readers pass on.

        Raises:
            _WrittenInPythonError: a reader cannot be run by itself.
        """
        nodes = {node: None for i in items for node in i.readers if node in self._incoming}
        if not all(callable(node) for node in nodes):
            raise _WrittenInPythonError
        return [
            (function, index, gradient)
            for node in nodes
            for (function, index), gradient in zip(
                node.next_functions, _outgoing(node, self._incoming[node]), strict=True
            )
        ]

    # Rows --------------------------------------------------------------------------------------

    def find_live(self, site: SaveSite, parameters: list[nn.Parameter]) -> None:
        """Learn of which tokens the site's rows are read; after :meth:`gradients`.

        Of a kind alone, if nothing changes when all other tokens' rows are zero, and something
        does when its own are: otherwise nothing at all may have been read.
        """
        for live in (Live.UNPADDED, Live.FIRST) if self._takes_first else (Live.UNPADDED,):
            if live in site.alive:
                continue
            others = self._reads(site, live, True, parameters)
            if others:
                site.alive.add(live)
                site.live = Live.ALL if site.live is live else site.live
            elif others is False and self._reads(site, live, False, parameters):
                site.live = live
        for item in self.items[site]:
            item.picked = self._picked(item, site.live)

    def find_watch(self) -> SaveSite | None:
        """The last site whose own gradient is zero in all rows but those that are stored.

        It must be so whatever is restored above: a quantized softmax gives masked keys a weight,
        and with it a gradient, which means nothing.
        """
        latest = [
            site
            for site, items in reversed(self.items.items())
            if items[0].edge is not None and items[0].picked is not None
        ][:WATCHES_TRIED]
        if not latest:
            return None
        everything = [item for items in self.items.values() for item in items]
        for item in everything:
            if item.flat.dtype.is_floating_point and item.flat.numel():
                item.restored = torch.full_like(item.flat, float(item.flat.float().mean()))
        gradients = _gradients([self.loss], [self.items[s][0].edge for s in latest], None)
        for item in everything:
            item.restored = None
        for site, gradient in zip(latest, gradients, strict=True):
            picked = self.items[site][0].picked
            if gradient is not None and picked is not None and bool(gradient.any()):
                rows = gradient.reshape(len(picked), -1)
                if not bool(rows[(~picked).to(rows.device)].any()):
                    return site
        return None

    def _reads(
        self, site: SaveSite, live: Live, others: bool, parameters: list[nn.Parameter]
    ) -> bool | None:
        """Whether anything is read of the rows of these tokens, or of all others.

        None where there are none, or where that cannot be told.
        """
        items = self._derived_from(self.items[site])
        zeroed = []
        for item in self.items[site]:
            picked = self._picked(item, live)
            if picked is None or not bool(picked.any()):
                return None
            kept = picked if others else ~picked
            zeroed.append(spread(take(item.flat, kept), kept, torch.empty_like(item.flat)))
        found = []
        try:
            for values in (zeroed, [item.flat for item in self.items[site]]):
                for item, value in zip(self.items[site], values, strict=True):
                    item.restored = value
                self._evaluate(items)  # in both, as that may round
                found.append(self._passed_on(items))
        except _WrittenInPythonError:
            return None
        finally:
            self.restore(site)
        differences = _differences(*found)
        if not differences or not others:
            return bool(differences)
        # A row of values at a key that is masked reaches the gradient of its weight, but no
        # further: the weight is zero.
        return any(d is not None and bool(d.any()) for d in _below(differences, parameters))


_PassedOn = tuple[Any, int, "Tensor | None"]
"""To which node, as the gradient of which of its outputs, and what."""


@contextmanager
def _as_saved(items: Iterable[Item]) -> Iterator[None]:
    """Inside, the items are read as they are."""
    restored = [(item, item.restored) for item in items]
    for item, _ in restored:
        item.restored = None
    try:
        yield
    finally:
        for item, value in restored:
            item.restored = value


def _differences(a: list[_PassedOn], b: list[_PassedOn]) -> list[tuple[Any, int, Tensor]]:
    """What is passed on otherwise, and by how much."""
    return [
        (function, index, x - y)
        for (function, index, x), (_, _, y) in zip(a, b, strict=True)
        if not (function is None or x is None or y is None or torch.equal(x, y))
    ]


def _below(
    differences: list[tuple[Any, int, Tensor]], parameters: list[nn.Parameter]
) -> list[Tensor | None]:
    """What such differences change of the parameters' gradients."""
    changes: dict[Any, Tensor] = {}
    edges: dict[GradientEdge, Tensor] = {}
    for function, index, difference in differences:
        # The engine reduces what a broadcast passes on, and casts it.
        metadata = function._input_metadata[index]
        delta = difference.sum_to_size(metadata.shape).to(metadata.dtype)
        leaf = getattr(function, "variable", None)
        target, key = (edges, GradientEdge(function, index)) if leaf is None else (changes, leaf)
        target[key] = target[key] + delta if key in target else delta
    below: list[Tensor | None] = [None] * len(parameters)
    if edges:
        below = _gradients(list(edges), parameters, list(edges.values()))
    return [
        _sum(gradient, changes.get(parameter))
        for gradient, parameter in zip(below, parameters, strict=True)
    ]


def _takes_first(node: Any) -> bool:
    """Whether a node takes the first of each example's tokens."""
    return operation(node.name()) == "Select" and node._saved_dim == 1 and node._saved_index == 0


def _source_of(packed: Any) -> Source | None:
    """What a packed tensor's elements can be had from, if they lie row by row."""
    if isinstance(packed, _Saved):
        row_by_row = is_contiguous(packed.shape, packed.stride)
        return Source(packed.item, tuple(packed.shape)) if row_by_row else None
    if isinstance(packed, Tensor) and is_ordinary(packed) and packed.is_contiguous():
        return Source(packed.view(-1), tuple(packed.shape))
    return None


_READER = Reader(lambda source: source.clone() if isinstance(source, Tensor) else source.own())


def _gradients(
    outputs: Any,
    parameters: Sequence[Any],
    incoming: list[Tensor] | None,
) -> list[Tensor | None]:
    return list(
        torch.autograd.grad(
            outputs, parameters, grad_outputs=incoming, retain_graph=True, allow_unused=True
        )
    )


def _outgoing(node: Any, incoming: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """What a node alone passes on."""
    with torch.no_grad():
        outgoing = node(*incoming)
    return outgoing if isinstance(outgoing, tuple) else (outgoing,)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _saved_slots(node_type: type) -> list[str]:
    slots = [name for name in dir(node_type) if name.startswith("_saved_")]
    return slots or (["saved_tensors"] if hasattr(node_type, "saved_tensors") else [])


@dataclass
class Finding:
    """What a survey found of a site.

    Attributes:
        shape, column: of the first tensor.
        numel: its elements to store.
        uses: tensors stored in one forward pass; duplicates of others' do not count.
        mean_square, mean_magnitude: of its elements.
        two_valued: it has exactly two values.
        keep: see :class:`SaveSite`.
        distortions: for each candidate codec, at 0..8 bits.
    """

    shape: tuple[int, ...]
    column: int
    numel: int
    uses: int
    mean_square: float
    mean_magnitude: float
    two_valued: bool
    keep: float | None
    distortions: dict[Codec, tuple[float, ...]]


class Survey(_Pass):
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
            item.column,
            flat.numel(),
            1,
            0.0 if empty else float(values.square().mean()),
            0.0 if empty else float(values.abs().mean()),
            False,
            None,
            {},
        )
        if flat.nbytes >= SMALLEST_BYTES and item.site.compressible:
            finding.two_valued = is_two_valued(flat)
            derived = item.site.derived
            if finding.two_valued:
                finding.keep = self.compressor.draws.learn(flat)
            if not finding.two_valued and not derived and flat.dtype in COMPRESSIBLE:
                finding.distortions = self._gauge.distortions(item)
        return finding
