"""Forward passes under hooks that see what is saved, and where."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef

from .batches import Inputs
from .checkpointed import LEAST_BITS
from .expressions import Expression
from .hook_stack import pop_hooks, push_hooks
from .repeats import condensed, spread_out
from .rows import Rows, spread, take
from .saved_tensors import Compressor
from .sites import Live, SaveSite
from .tensors import MATCHED_ROW, are_rows, columns, flatten, geometry, is_ordinary


@dataclass(eq=False)
class Item:
    """Elements that a forward pass saved: a flat tensor, and the shape that was saved.

    Attributes:
        site: the save site that stored them first.
        flat: the elements, as they lie in memory.
        shape, stride, columns: of the saved tensor; the dimensions of a row of its memory.
        edge: where the gradient of the saved tensor arrives; None where there is none, or the
            tensor does not lie row by row.
        picked: ``bool [rows]``, which rows are read; None where all are.
        restored: what a perturbed backward pass reads instead.
        readers: the autograd nodes that read it.
        expression: how the elements follow from other items, if they do.
        repeats: the elements that were saved repeat these (:mod:`daf_hf.repeats`).
    """

    site: SaveSite
    flat: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    columns: tuple[int, ...]
    edge: GradientEdge | None = None
    picked: Tensor | None = None
    restored: Tensor | None = None
    readers: set[Any] = field(default_factory=set)
    expression: Expression | None = None
    repeats: bool = False

    @property
    def cols(self) -> int:
        """Columns of the elements."""
        return columns(self.shape, self.columns, self.kept().numel())

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

    @property
    def matched(self) -> bool:
        """Its rows are restored with their own statistics (:mod:`daf_hf.matching`)."""
        return self.site.normalised and are_rows(self.columns, self.shape, MATCHED_ROW)

    @property
    def witnessed(self) -> bool:
        """A few elements of the others confirm in each step that it follows from them."""
        return self.expression is not None and self.expression.witnessed

    def sources(self) -> list[Item]:
        """The items that it follows from."""
        found = self.expression.sources() if self.expression is not None else ()
        return [source for source in found if isinstance(source, Item)]

    def all(self) -> Tensor:
        """The elements that were saved, or what is read instead, as they lie in memory."""
        flat = self.flat if self.restored is None else self.restored
        return spread_out(flat, self.shape, self.stride) if self.repeats else flat

    def own(self) -> Tensor:
        """The same, in memory that the caller may change."""
        return self.all().clone()


@dataclass(eq=False)
class Saved:
    item: Item
    shape: torch.Size
    stride: tuple[int, ...]


class Pass(ABC):
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
        site = compressor.tracker.site(sys._getframe(1), tensor)
        site.shape, site.dtype = tensor.shape, tensor.dtype
        self.nbytes += self._first_seen(storage)
        shape, stride = tensor.shape, tensor.stride()
        extent, dims, whole = geometry(shape, stride)
        version = -1 if tensor.is_inference() else tensor._version
        key = (storage._cdata, tensor.storage_offset(), tensor.dtype, version, extent)
        if not whole:
            tensor = tensor.detach().contiguous()
            key, stride = (*key, shape, stride), tensor.stride()
            extent, dims, _ = geometry(shape, stride)
        # As when tensors are stored: what needs more bits is stored once more.
        enough = LEAST_BITS[LEAST_BITS.index(site.least_bits) :]
        keys = [(*key, least) for least in enough]
        key = next((each for each in keys if each in self._known), keys[0])
        if key not in self._known:
            once = condensed(original) if compressor.config.derive and site.compressible else None
            if once is not None:
                tensor, shape, stride = once, once.shape, once.stride()
                extent, dims, _ = geometry(shape, stride)
            item = Item(
                site,
                flatten(tensor, extent),
                tuple(shape),
                stride,
                dims,
                repeats=once is not None,
            )
            if original.grad_fn is not None and original.is_contiguous() and once is None:
                item.edge = GradientEdge(original.grad_fn, original.output_nr)
            item.picked = self.picked(item, site.live)
            self._known[key] = self._first(item, tensor)
        elif isinstance(self._known[key], Item):
            self._known[key].site.shared_by.add(site)
        return self._again(self._known[key], original)

    def picked(self, item: Item, live: Live) -> Tensor | None:
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
