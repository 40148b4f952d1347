"""Pack and unpack: what happens to every tensor that autograd saves.

The way of a tensor: site -> exact paths -> what it follows from -> its place, and back. Where
elements are put is the part of :mod:`daf_hf.placement`.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .attention import Slot
from .checkpointed import LEAST_BITS
from .config import DAFConfig
from .derivations import is_certain, remember
from .deriving import Deriver
from .handles import Handle, Kept, Note, Recast, View
from .hook_stack import pop_hooks, push_hooks, top_hooks
from .leases import Lease
from .matching import Matched
from .physical import Derived, Physical
from .placement import Placement
from .refusal import Refusal
from .repeats import Repeated, condensed
from .rows import LiveRows, Pick, Rows, Watch, lacks_rows, take
from .sites import Live, SaveSite, SiteTracker
from .tensors import (
    HALVES,
    columns,
    contiguous_stride,
    flatten,
    geometry,
    is_ordinary,
    source_of_copy,
)


class _Scope(threading.local):
    """What a thread is inside of.

    Attributes:
        depth: how many scopes of the compressor.
        backward: torch's number of the backward pass in which the innermost was entered; -1
            outside of any.
    """

    depth = 0
    backward = -1


class Compressor:
    """The saved-tensors hooks of one model, and all that they hold.

    Args:
        model: the model; its parameters and buffers are never stored.
        config: the options.

    Attributes:
        tracker: names save sites.
        placement: puts elements where they belong.
        rows: the tokens of the forward pass that goes on; None where all rows are stored.
        arena, workspace, ledger, draws, backend, lock, unplanned: the placement's.
    """

    def __init__(self, model: nn.Module, config: DAFConfig) -> None:
        self._model = weakref.ref(model)
        self.config = config
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.placement = placement = Placement(config, self.device)
        self.arena, self.workspace, self.ledger = (
            placement.arena,
            placement.workspace,
            placement.ledger,
        )
        self.draws, self.backend = placement.draws, placement.backend
        self.lock, self.unplanned = placement.lock, placement.unplanned
        self.tracker = SiteTracker(
            model, config.include, config.exclude, self.draws.note, config.checkpoint_bits
        )
        self._hooks = (self._pack, self._unpack)
        self._local = _Scope()
        self._parameters: frozenset[int] = frozenset()
        self._physicals: dict[tuple[Any, ...], weakref.ref[Physical]] = {}
        self.rows: Rows | None = None
        self._deriver = Deriver(placement, config.derive)
        self._end_save = placement.ends.later(self.ledger.unsave)

    @property
    def model(self) -> nn.Module:
        """The model.

        Raises:
            ReferenceError: when it is gone.
        """
        model = self._model()
        if model is None:
            raise ReferenceError("the model that daf_hf compressed is gone")
        return model

    # The hooks' scope --------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether this thread is inside :meth:`scope`."""
        return self._local.depth > 0

    @property
    def on_top(self) -> bool:
        """Whether what this thread saves comes here before any other hooks."""
        top = top_hooks()
        return top is not None and top[0] == self._hooks[0]

    @property
    def recomputes(self) -> bool:
        """Whether this thread is in a backward pass that began inside of its scope."""
        return torch._C._current_graph_task_id() != self._local.backward

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Compress what autograd saves inside, in this thread."""
        if not self.active:
            self.placement.refusal = Refusal()
        if not self._parameters:
            self.learn_parameters()
        calls = self.tracker.start()
        push_hooks(self._hooks)
        outer = self._local.backward
        self._local.depth += 1
        self._local.backward = torch._C._current_graph_task_id()
        try:
            yield
        finally:
            self._local.depth -= 1
            self._local.backward = outer
            pop_hooks(self._hooks)
            self.tracker.finish(calls)

    def begin_forward(self) -> None:
        """A forward pass of the model begins: settle what has ended, learn what is the model's."""
        with self.lock:
            self.placement.settle()
            self.placement.refusal = Refusal()
            self.placement.giving_way.clear()
            self.workspace.clear()
            if not self._physicals:
                self._deriver.renew()
        self.tracker.restart()
        self.draws.note()
        self.learn_parameters()

    def learn_parameters(self) -> None:
        """Learn the storages of the model's parameters and buffers."""
        storages = set()
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            with suppress(NotImplementedError, RuntimeError):  # subclasses without a storage
                storages.add(tensor.untyped_storage()._cdata)
        self._parameters = frozenset(storages)

    def is_parameter(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether this is a parameter or buffer of the model, or anybody's parameter."""
        if storage._cdata in self._parameters:
            return True
        base = tensor._base
        return isinstance(tensor if base is None else base, nn.Parameter)

    def held_bytes(self) -> int:
        """All bytes held for backward, once all that waits is packed."""
        with self.lock:
            self.placement.settle()
            return self.arena.held_bytes

    def set_limit(self, limit_bytes: float) -> bool:
        """Change the budget; False when what is live stays above it for now."""
        with self.lock:
            return self.placement.room.set_limit(limit_bytes)

    def release_idle(self) -> None:
        """Give back all memory that holds nothing."""
        self.placement.release_idle()

    # Pack and unpack ---------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Handle:
        began = perf_counter()
        kernels = self.ledger.kernel_seconds
        frame = sys._getframe(1)
        handle = None if is_ordinary(tensor) else self._keep(tensor)
        with self.lock:
            self.placement.ends.settle()
            if handle is None:
                handle = self._save(tensor, frame)
            ledger, arena = self.ledger, self.arena
            ledger.observe(
                arena.held_bytes,
                arena.outside_bytes,
                arena.stored_elements,
                arena.stored_bits,
                self.placement.waiting_bytes,
                arena.limit_bytes,
            )
            ledger.hook_seconds += perf_counter() - began - (ledger.kernel_seconds - kernels)
        return handle

    def _unpack(self, handle: Handle) -> Tensor:
        began = perf_counter()
        kernels = self.ledger.kernel_seconds
        tensor = handle.restore()
        ledger = self.ledger
        if isinstance(handle, View) and isinstance(handle.physical, (Derived, Matched, Slot)):
            ledger.kernel_seconds = kernels + perf_counter() - began  # arithmetic, all of it
        ledger.hook_seconds += perf_counter() - began - (ledger.kernel_seconds - kernels)
        return tensor

    def _keep(self, tensor: Tensor) -> Handle:
        """Keep what is not understood, counted by its own word.

        The lock is free while code of the tensor's class runs: that may save tensors itself.
        """
        kept = Kept(tensor)
        with suppress(NotImplementedError, RuntimeError, TypeError):
            kept.lease = self.placement.hold_unknown(int(tensor.nbytes))
        self.ledger.count("not_understood")
        return kept

    def _save(self, tensor: Tensor, frame: FrameType) -> Handle:
        storage = tensor.untyped_storage()
        cdata = storage._cdata
        if self.is_parameter(tensor, storage):
            return Kept(tensor)
        if self.recomputes:
            # Saved by a checkpoint that recomputes in backward: read at once, then gone. (A forward
            # pass that itself began in backward, as gradient caches do, is one like any other.)
            self.ledger.count("recomputed")
            return Kept(tensor)
        parameter = self.recast_of(tensor)
        if parameter is not None:
            self.ledger.save(cdata, storage)
            return Recast(tensor, parameter, Lease(self._end_save, cdata))
        site = self.tracker.site(frame, tensor)
        site.shape, site.dtype = tensor.shape, tensor.dtype
        first = self.ledger.save(cdata, storage)
        site.nbytes = storage.nbytes() if first else 0
        lease = Lease(self._end_save, cdata)
        if math.isinf(self.arena.limit_bytes):
            return Kept(tensor, (lease, self.placement.hold_storage(cdata)))
        return self._store(tensor, site, cdata, lease)

    def _store(self, tensor: Tensor, site: SaveSite, cdata: int, lease: Lease) -> Handle:
        """Store the elements once, however many saved tensors are views of them."""
        shape, stride = tensor.shape, tensor.stride()
        extent, dims, whole = geometry(shape, stride)
        version = -1 if tensor.is_inference() else tensor._version
        key = (cdata, tensor.storage_offset(), tensor.dtype, version, extent)
        if not whole:
            key = (*key, shape, stride)
        physical = self._stored_before(key, site)
        if physical is None or not _serves(physical, site):
            source = tensor if whole else tensor.detach().contiguous()
            if not whole:
                extent, dims, _ = geometry(shape, source.stride())
            flat = flatten(source, extent)
            physical = None
            if whole and self._deriver.may_derive(flat, tensor, site):
                physical = self._deriver.derive(flat, tensor, site)
            if physical is None:
                physical = self._store_once(tensor, site, cdata)
            if physical is None:
                physical = self._store_rows(flat, source, tensor, site, cdata)
            if physical is None:
                cols = columns(shape, dims, extent)
                physical = self.placement.place(flat, cols, site, cdata, whole)
            physical.saved = lease
            if site.watched is not Live.ALL:
                self._watch(tensor, site)
            if site.feeds and flat.numel():
                self._deriver.take_witnesses(flat, physical)
            key = (*key, site.least_bits)
            self._physicals[key] = weakref.ref(physical, self._forget(key))
            if site.two_valued:
                self.draws.note()
        else:
            site.placed = physical.site.placed
        if not whole:
            stride = contiguous_stride(shape)
        view = View(tensor, shape, stride, physical, lease)
        if isinstance(physical, Derived) and is_certain(tensor):
            self._deriver.bind(view, tensor)
        if physical.site.feeds:
            remember(tensor, Note(weakref.ref(physical), tuple(shape), view.version))
        return view

    def _stored_before(self, key: tuple[Any, ...], site: SaveSite) -> Physical | None:
        """The same elements, stored for any site that needs no fewer bits than this one."""
        for least in LEAST_BITS[LEAST_BITS.index(site.least_bits) :]:
            reference = self._physicals.get((*key, least))
            if reference is not None and (physical := reference()) is not None:
                return physical
        return None

    def _store_once(self, tensor: Tensor, site: SaveSite, cdata: int) -> Physical | None:
        """Store those elements alone that are not repeated; None where none are."""
        found = condensed(tensor) if self.config.derive and site.compressible else None
        if found is None:
            return None
        shape, stride = tuple(found.shape), found.stride()
        extent, dims, _ = geometry(shape, stride)
        flat = flatten(found, extent)
        once = self._store_rows(flat, found, tensor, site, cdata)
        if once is None:
            cols = columns(shape, dims, extent)
            once = self.placement.place(flat, cols, site, cdata, False)
        return Repeated(site, once, shape, stride)

    def _store_rows(
        self, flat: Tensor, source: Tensor, tensor: Tensor, site: SaveSite, cdata: int
    ) -> Physical | None:
        """Store those rows alone that are read; None where that is not known, or all are."""
        rows, probed = self.rows, site.probed
        if site.live is Live.ALL or rows is None or probed is None or not flat.numel():
            return None
        shape, stride = tuple(source.shape), source.stride()
        picked = rows.of(site.live, shape, stride, probed.roles)
        if picked is None or not bool(picked.any()):
            return None
        if rows.lease is None:
            rows.lease = self.placement.reserve(rows.nbytes)
        if rows.lease is None:
            return None
        kept = take(flat, picked)
        cols = columns(shape, geometry(shape, stride)[1], kept.numel())
        physical = self.placement.place(kept, cols, site, cdata, False)
        pick = Pick(rows, site.live, shape, stride, probed.roles)
        return LiveRows(site, physical, pick, self.placement.spread)

    def _watch(self, tensor: Tensor, site: SaveSite) -> None:
        """Have the gradient looked at in the rows that other sites do not store."""
        rows, probed, node = self.rows, site.probed, tensor.grad_fn
        if rows is None or probed is None or node is None or not tensor.is_contiguous():
            return
        pick = Pick(rows, site.watched, tuple(tensor.shape), tensor.stride(), probed.roles)
        if rows.of(*pick[1:]) is not None:
            node.register_prehook(Watch(site, pick, tensor.output_nr))

    def _forget(self, key: tuple[Any, ...]) -> Callable[[Any], None]:
        physicals = self._physicals

        def forget(reference: Any) -> None:
            if physicals.get(key) is reference:
                del physicals[key]

        return forget

    def recast_of(self, tensor: Tensor) -> Tensor | None:
        """The parameter of the current module of which ``tensor`` is a low-precision copy."""
        if tensor.dtype not in HALVES:
            return None
        return source_of_copy(tensor, self.tracker.current_module()._parameters.values())


def _serves(physical: Physical, site: SaveSite) -> bool:
    """Whether elements that were stored for another site will do for this one."""
    if physical.site is site:
        return True
    return not physical.private and (not lacks_rows(physical) or site in physical.site.shared_by)
