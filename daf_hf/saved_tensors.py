"""Pack and unpack: what happens to every tensor that autograd saves.

The way of a tensor: site -> exact paths -> codec -> kernel -> pages, and back. Nothing here
decides on bits; that is the plan's part (:mod:`daf_hf.planning`).
"""

from __future__ import annotations

import logging
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

from .accounting import Ledger
from .arena import PAGE_COST, Arena, Stored
from .codecs import BINARY, FRUGAL, GENERAL, Codec
from .config import DAFConfig
from .derivations import derivation, witnesses
from .dropout import Draws
from .handles import (
    WITNESSES,
    Copy,
    DeferredEnds,
    Derived,
    Drawn,
    Handle,
    Kept,
    Lease,
    Pages,
    Physical,
    Recast,
    Refused,
    Spilled,
    View,
    source_of,
)
from .hook_stack import pop_hooks, push_hooks, top_hooks
from .kernels import get_backend
from .kernels.format import MAX_BITS
from .kernels.noise import STATE_BYTES, Stream, streams
from .refusal import BudgetError, Refusal
from .sites import SaveSite, SiteTracker
from .spill import SpillFile
from .tensors import (
    columns,
    contiguous_stride,
    flatten,
    geometry,
    is_ordinary,
    is_representable,
    may_be_two_valued,
    source_of_copy,
)
from .workspace import Workspace

logger = logging.getLogger("daf_hf")

SMALLEST_BYTES = 4096
"""Tensors below this are kept exactly."""

COMPRESSIBLE = (torch.float32, torch.bfloat16, torch.float16)
UNPLANNED_BITS = 4
UNPLANNED_COSTS = tuple(4.0**-bits for bits in range(9))
"""Width and costs for sites that no plan knows yet (a tensor's own energy counts 1)."""


class Compressor:
    """The saved-tensors hooks of one model, and all that they hold.

    Args:
        model: the model; its parameters and buffers are never stored.
        config: the options.

    Attributes:
        arena, workspace, ledger, tracker, draws, backend: the parts.
        lock: held while the arena changes.
        refuses: an overflow is refused (:class:`BudgetError`) rather than spilled.
        calibrated: there are importances to plan by.
        frugal: the budget was too small even to calibrate.
        unplanned: sites seen since the last calibration that no plan knows.
    """

    def __init__(self, model: nn.Module, config: DAFConfig) -> None:
        self._model = weakref.ref(model)
        self.config = config
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.backend = get_backend(config.backend, self.device)
        self.arena = Arena(config.budget_bytes, self.device)
        self.workspace = Workspace()
        self.ledger = Ledger()
        self.draws = Draws(streams(self.backend))
        self.tracker = SiteTracker(model, config.include, config.exclude, self.draws.note)
        self.refuses = config.on_overflow == "error"
        self.refusal = Refusal()
        self.calibrated = False
        self.frugal = False
        self.unplanned: set[SaveSite] = set()
        self.lock = threading.Lock()
        self._hooks = (self._pack, self._unpack)
        self._local = threading.local()
        self._parameters: frozenset[int] = frozenset()
        self._physicals: dict[tuple[Any, ...], weakref.ref[Physical]] = {}
        self._spill = SpillFile()
        self._ends = DeferredEnds(self.lock)
        self._end_save = self._ends.later(self.ledger.unsave)
        self._end_outside = self._ends.later(self.arena.release_outside)
        self._end_pages = self._ends.later(self.arena.remove)
        self._end_exact = self._ends.later(self._unhold)

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
        return getattr(self._local, "depth", 0) > 0

    @property
    def shadowed(self) -> bool:
        """Whether another model's scope is what this thread entered last."""
        top = top_hooks()
        owner = getattr(top[0], "__self__", None) if top else None
        return isinstance(owner, Compressor) and owner is not self

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Compress what autograd saves inside, in this thread."""
        if not self.active:
            self.refusal = Refusal()
        self.learn_parameters()
        calls = self.tracker.start()
        push_hooks(self._hooks)
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1
            pop_hooks(self._hooks)
            self.tracker.finish(calls)

    def begin_forward(self) -> None:
        """A forward pass of the model begins: settle what has ended, learn what is the model's."""
        with self.lock:
            self._ends.settle()
            self.workspace.clear()
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
        """All bytes held for backward now."""
        with self.lock:
            self._ends.settle()
            return self.arena.held_bytes

    def set_limit(self, limit_bytes: float) -> bool:
        """Change the budget; False when what is live stays above it for now."""
        with self.lock:
            self._ends.settle()
            self.refusal = Refusal()
            return self.arena.set_limit(limit_bytes)

    def release_idle(self) -> None:
        """Give back all memory that holds nothing."""
        with self.lock:
            self._ends.settle()
            self.arena.trim()
            self.workspace.clear()

    # Pack and unpack ---------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Handle:
        began = perf_counter()
        kernels = self.ledger.kernel_seconds
        frame = sys._getframe(1)
        with self.lock:
            self._ends.settle()
            handle = self._save(tensor, frame)
            ledger, arena = self.ledger, self.arena
            ledger.observe(
                arena.held_bytes, arena.outside_bytes, arena.stored_elements, arena.stored_bits
            )
            ledger.hook_seconds += perf_counter() - began - (ledger.kernel_seconds - kernels)
        return handle

    def _unpack(self, handle: Handle) -> Tensor:
        began = perf_counter()
        kernels = self.ledger.kernel_seconds
        tensor = handle.restore()
        ledger = self.ledger
        ledger.hook_seconds += perf_counter() - began - (ledger.kernel_seconds - kernels)
        return tensor

    def decode(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The elements of ``stored`` as a new flat tensor."""
        with self.lock:
            began = perf_counter()
            self.arena.trim_if_idle()
            out = self.workspace.empty(stored.layout.numel, dtype, self.arena.device)
            self.backend.decode(out, stored.layout, stored.bits, stored.table, self.arena.space)
            self.ledger.kernel_seconds += perf_counter() - began
        return out

    def draw(self, stream: Stream, numel: int, dtype: torch.dtype) -> Tensor:
        """The next ``numel`` elements of a stream as a new flat tensor."""
        with self.lock:
            began = perf_counter()
            out = self.workspace.empty(numel, dtype, self.arena.device)
            stream.fill(out)
            self.ledger.kernel_seconds += perf_counter() - began
        return out

    def _save(self, tensor: Tensor, frame: FrameType) -> Handle:
        if not is_ordinary(tensor):
            self.ledger.count("not_understood")
            return Kept(tensor, self._outside_lease(tensor))
        storage = tensor.untyped_storage()
        cdata = storage._cdata
        if self.is_parameter(tensor, storage):
            return Kept(tensor)
        if torch._C._current_graph_task_id() != -1:
            # Saved by a checkpoint that recomputes in backward: read at once, then gone.
            self.ledger.count("recomputed")
            return Kept(tensor)
        site = self.tracker.site(frame, type(tensor.grad_fn))
        site.shape, site.dtype = tensor.shape, tensor.dtype
        first = self.ledger.save(cdata, storage)
        site.nbytes = storage.nbytes() if first else 0
        lease = Lease(self._end_save, cdata)
        if math.isinf(self.arena.limit_bytes):
            self.arena.outside_bytes += self.ledger.hold_exactly(cdata)
            lease = (lease, Lease(self._end_exact, cdata))
            return Kept(tensor, lease)
        parameter = self.recast_of(tensor)
        if parameter is not None:
            return Recast(tensor, parameter, lease)
        return self._store(tensor, site, cdata, lease)

    def _store(self, tensor: Tensor, site: SaveSite, cdata: int, lease: Lease) -> Handle:
        """Store the elements once, however many saved tensors are views of them."""
        shape, stride = tensor.shape, tensor.stride()
        extent, column, whole = geometry(shape, stride)
        version = -1 if tensor.is_inference() else tensor._version
        key = (cdata, tensor.storage_offset(), tensor.dtype, version, extent)
        if not whole:
            key = (*key, shape, stride)
        reference = self._physicals.get(key)
        physical = reference() if reference is not None else None
        if physical is None or (physical.private and physical.site is not site):
            source = tensor if whole else tensor.detach().contiguous()
            if not whole:
                extent, column, _ = geometry(shape, source.stride())
            flat = flatten(source, extent)
            physical = None
            if site.derived and whole and self.wants_pages(flat, site):
                physical = self._derive(flat, tensor, site)
            if physical is None:
                cols = columns(shape, column, extent)
                physical = self._place(flat, cols, site, cdata, whole)
            physical.saved = lease
            if site.feeds and flat.numel():
                physical.witnesses = flat[witnesses(flat.numel())]
            self._physicals[key] = weakref.ref(physical, self._forget(key))
            if site.two_valued:
                self.draws.note()
        else:
            site.placed = physical.site.placed
        if not whole:
            stride = contiguous_stride(shape)
        return View(tensor, shape, stride, physical, lease)

    def _derive(self, flat: Tensor, tensor: Tensor, site: SaveSite) -> Physical | None:
        """Store nothing: the elements follow from what is held already."""
        versions = []

        def resolve(packed: Any) -> tuple[Any, int] | None:
            found = source_of(packed)
            if found is not None and isinstance(found[0], (Tensor, Copy)) and packed.version:
                versions.append(packed.version)
            return found

        expression = derivation(tensor, flat.numel(), resolve)
        if expression is not None:
            with suppress(LookupError):
                if expression.agrees(flat, WITNESSES, witnesses(flat.numel())):
                    site.placed = "derived", None
                    return Derived(site, expression, versions, tensor.dtype)
        site.derived, site.doubted = False, True
        self.unplanned.add(site)
        self.ledger.count("doubted")
        return None

    def _forget(self, key: tuple[Any, ...]) -> Callable[[Any], None]:
        physicals = self._physicals

        def forget(reference: Any) -> None:
            if physicals.get(key) is reference:
                del physicals[key]

        return forget

    # Placement ---------------------------------------------------------------------------------

    def _place(self, flat: Tensor, cols: int, site: SaveSite, cdata: int, whole: bool) -> Physical:
        """Store ``flat``: as the generator's state, in one plane, as planned, or exactly."""
        if self.wants_pages(flat, site):
            if not site.known:
                self.unplanned.add(site)
            option = site.option
            if site.keep is not None:
                physical = self._draw_again(flat, site, site.keep)
                if physical is not None:
                    return physical
            if site.two_valued or (option is None and may_be_two_valued(flat)):
                binary = Stored(BINARY.layout(flat.numel(), cols, 1), 1, (1,), ())
                physical = self._encode(flat, site, binary, BINARY)
                if physical is not None:
                    return physical
            if flat.dtype is not torch.bool and (option is None or option.codec is not None):
                physical = self._encode(flat, site, *self._planned(flat, cols, site))
                if physical is not None:
                    return physical
        return self._hold(flat, cols, site, cdata, whole)

    def _draw_again(self, flat: Tensor, site: SaveSite, keep: float) -> Physical | None:
        """Hold what the elements were drawn from; None where they were not."""
        noise = self.draws.recognise(flat, keep)
        if noise is None or self.refusal or not self._reserve(STATE_BYTES):
            return None
        site.placed = "drawn", None
        return Drawn(site, Lease(self._end_outside, STATE_BYTES), noise, self.draw)

    def wants_pages(self, flat: Tensor, site: SaveSite) -> bool:
        """Whether a tensor may be encoded at all."""
        return (
            site.compressible
            and flat.nbytes >= SMALLEST_BYTES
            and (flat.dtype in COMPRESSIBLE or flat.dtype is torch.bool)
        )

    def _planned(self, flat: Tensor, cols: int, site: SaveSite) -> tuple[Stored, Codec]:
        option, allowed = site.option, self.config.bits
        if option is None or option.codec is None or option.bits is None:
            # Beside a plan these are few, and many bits for them cost little.
            most = MAX_BITS if self.calibrated else UNPLANNED_BITS
            bits = max((b for b in allowed if b <= most), default=allowed[0])
            codec, costs = FRUGAL if self.frugal else GENERAL, UNPLANNED_COSTS
        else:
            codec, bits, costs = option.codec, option.bits, option.costs
        return Stored(codec.layout(flat.numel(), cols, bits), bits, allowed, costs), codec

    def _encode(
        self, flat: Tensor, site: SaveSite, stored: Stored, codec: Codec
    ) -> Physical | None:
        """Encode into pages; None when the codec cannot represent the elements."""
        if self.refusal or not self._make_room(stored):
            if self.refuses and not is_representable(flat, codec.lossless):
                return None  # what is counted must be what would be held
            fewest = stored.layout.pages(stored.widths[0])
            return self._overflow(flat, site, fewest * PAGE_COST)
        began = perf_counter()
        done = self.backend.encode(flat, stored.layout, stored.bits, stored.table, self.arena.space)
        self.ledger.kernel_seconds += perf_counter() - began
        if not done:
            self.arena.remove(stored)
            if not codec.lossless:
                self.ledger.count("not_finite")
            return None
        site.placed = codec, stored.bits
        lease = Lease(self._end_pages, stored)
        return Pages(site, lease, codec.private, stored, flat.dtype, self.decode)

    def _make_room(self, stored: Stored) -> bool:
        """Insert ``stored``, demoting whatever costs least per page: the live ones or itself."""
        arena = self.arena
        while not arena.insert(stored):
            own, live = stored.demotion_score(), arena.cheapest_demotion()
            if own <= live:
                lower = stored.lower()
                if lower is None:
                    return False
                stored.bits = lower
            else:
                arena.demote_cheapest()
        return True

    def _hold(self, flat: Tensor, cols: int, site: SaveSite, cdata: int, whole: bool) -> Physical:
        """Hold exactly: the storage itself where that costs no more than a copy."""
        ledger = self.ledger
        shared = whole and (
            ledger.is_held_exactly(cdata) or ledger.storage_bytes(cdata) <= flat.nbytes
        )
        needed = ledger.hold_exactly(cdata) if shared else flat.nbytes
        site.placed = "exact", None
        if not self.refusal and self._reserve(needed):
            if shared:
                return Copy(site, flat, Lease(self._end_exact, cdata))
            return Copy(site, flat.clone() if whole else flat, Lease(self._end_outside, needed))
        if shared:
            ledger.release_exactly(cdata)
        if flat.dtype in COMPRESSIBLE and self.wants_pages(flat, site):
            physical = self._encode(flat, site, *self._planned(flat, cols, site))
            if physical is not None:
                return physical
        return self._overflow(flat, site, needed)

    def _reserve(self, nbytes: int) -> bool:
        """Count exact bytes, demoting live activations as far as it takes."""
        while not self.arena.reserve_outside(nbytes):
            if math.isinf(self.arena.cheapest_demotion()):
                return False
            self.arena.demote_cheapest()
        return True

    def _overflow(self, flat: Tensor, site: SaveSite, needed: int) -> Physical:
        """What to do with elements that have no room even at the fewest bits."""
        if not self.refuses:
            if not self.ledger.counts.get("spilled") and self.config.on_overflow == "error":
                logger.warning(
                    "daf_hf: the budget of %g MB has no room for all that this step saves, even at "
                    "the fewest bits; the rest is spilled to a file, which is slow",
                    self.arena.limit_bytes / 1e6,
                )
            self.ledger.count("spilled")
            return Spilled(site, flat, self._spill)
        if not self.refusal:
            self.refusal.begin(self.arena.limit_bytes, self.arena.held_bytes, self.config.bits[0])
        self.refusal.add(site.name, needed)
        return Refused(site, self.refusal)

    def take_refusal(self) -> BudgetError | None:
        """The error that a forward pass without enough room ends in; None when it had enough."""
        with self.lock:
            refusal, self.refusal = self.refusal, Refusal()
        return refusal.error() if refusal else None

    def recast_of(self, tensor: Tensor) -> Tensor | None:
        """The parameter of the current module of which ``tensor`` is a low-precision copy."""
        return source_of_copy(tensor, self.tracker.current_module()._parameters.values())

    # Ends --------------------------------------------------------------------------------------

    def _unhold(self, cdata: int) -> None:
        self.arena.release_outside(self.ledger.release_exactly(cdata))

    def _outside_lease(self, tensor: Tensor) -> Lease | None:
        """Count a tensor that is not understood by its own word."""
        try:
            nbytes = int(tensor.nbytes)
        except (NotImplementedError, RuntimeError, TypeError):
            return None
        self.arena.outside_bytes += nbytes
        return Lease(self._end_outside, nbytes)
