"""What autograd keeps in place of a saved tensor."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dropout import PART_ELEMENTS, Noise
from .expressions import Expression, Reader, Source
from .kernels.noise import Stream
from .refusal import Refusal
from .sites import SaveSite
from .spill import Parcel, SpillFile
from .stored import Stored
from .tensors import flatten, is_contiguous, is_ordinary

_EMPTY: dict[tuple[torch.dtype, torch.device], Tensor] = {}


class Lease:
    """Calls ``end(what)`` once, when the last reference to it goes."""

    __slots__ = ("_end", "_what")

    def __init__(self, end: Callable[[Any], None], what: Any) -> None:
        self._end = end
        self._what = what

    def __del__(self) -> None:
        self._end(self._what)


class DeferredEnds:
    """Runs what is to happen at the end of a handle, while a lock is held.

    Handles die wherever Python drops them, also in a garbage collection while the arena is being
    changed: an end that does not get the lock waits for its next holder.

    Args:
        lock: not reentrant.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._waiting: deque[tuple[Callable[[Any], None], Any]] = deque()

    def later(self, end: Callable[[Any], None]) -> Callable[[Any], None]:
        """``end`` for a :class:`Lease`."""
        lock, waiting = self._lock, self._waiting

        def finish(what: Any) -> None:
            if lock.acquire(blocking=False):
                try:
                    end(what)
                finally:
                    lock.release()
            else:
                waiting.append((end, what))

        return finish

    def settle(self) -> bool:
        """Run what waits; False when nothing did. The caller holds the lock."""
        some = bool(self._waiting)
        while self._waiting:
            end, what = self._waiting.popleft()
            end(what)
        return some


class Version:
    """Notices in-place changes of a saved tensor, as plain autograd does.

    A detached alias shares the version counter of its source; giving it empty data lets go of
    the source's memory but not of the counter.

    Args:
        tensor: the saved tensor.
        alias: a detached alias, if one is kept anyhow.
    """

    __slots__ = ("_counter", "_shape", "_version")

    def __init__(self, tensor: Tensor, alias: Tensor | None = None) -> None:
        self._counter = _without_memory(tensor) if alias is None else alias
        self._shape = tensor.shape
        self._version = tensor._version

    def check(self) -> None:
        """Raise if the tensor was changed.

        Raises:
            RuntimeError: as autograd would.
        """
        if self._counter._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a saved tensor of shape {tuple(self._shape)} is at version "
                f"{self._counter._version}; expected version {self._version} instead"
            )


def _without_memory(tensor: Tensor) -> Tensor:
    key = (tensor.dtype, tensor.device)
    empty = _EMPTY.get(key)
    if empty is None:
        empty = _EMPTY[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    alias = tensor.detach()
    alias.data = empty
    return alias


class Handle(ABC):
    """One saved tensor. ``restore()`` gives it back with its shape, strides and dtype."""

    __slots__ = ("lease", "version")

    def __init__(self, tensor: Tensor, lease: Any = None, alias: Tensor | None = None) -> None:
        self.version = None if tensor.is_inference() else Version(tensor, alias)
        self.lease = lease

    def restore(self) -> Tensor:
        if self.version is not None:
            self.version.check()
        return self._restore()

    @abstractmethod
    def _restore(self) -> Tensor: ...


class Kept(Handle):
    """The tensor itself, detached (an operation's own output would be an uncollectable cycle)."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor, lease: Any = None) -> None:
        self.tensor = tensor.detach()
        super().__init__(tensor, lease, self.tensor)

    def _restore(self) -> Tensor:
        return self.tensor


class Recast(Handle):
    """A low-precision copy of a parameter: cast again from the parameter, to the same bits."""

    __slots__ = ("dtype", "parameter", "shape", "stride")

    def __init__(self, tensor: Tensor, parameter: Tensor, lease: Lease) -> None:
        super().__init__(parameter, lease)
        self.parameter = parameter.detach()
        self.dtype, self.shape, self.stride = (tensor.dtype, tensor.shape, tensor.stride())

    def _restore(self) -> Tensor:
        flat = flatten(self.parameter, self.parameter.numel()).to(self.dtype)
        return flat.as_strided(self.shape, self.stride)


class Physical(ABC):
    """The elements behind one or more handles, stored once.

    Attributes:
        site: the save site that stored them.
        private: only this site's own consumers may read what is restored.
        witnesses: a few of the elements, exactly, where others are derived from these.
        saved: lease of the storage: while anything may refer to it, its address stays taken.
    """

    __slots__ = (
        "__weakref__",
        "lease",
        "private",
        "saved",
        "site",
        "witness_lease",
        "witnesses",
    )

    def __init__(self, site: SaveSite, lease: Lease | None = None, private: bool = False) -> None:
        self.site = site
        self.lease = lease
        self.private = private
        self.witnesses: Tensor | None = None
        self.witness_lease: Lease | None = None
        self.saved: Any = None

    @abstractmethod
    def flat(self) -> Tensor:
        """The elements as a contiguous 1-D tensor."""

    def own(self) -> Tensor:
        """The same, in memory that the caller may change."""
        return self.flat()

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """The same, in parts where that can be, with the position of each one's first element."""
        yield 0, self.own()


class Pages(Physical):
    """Elements in the arena."""

    __slots__ = ("decode", "dtype", "stored")

    def __init__(
        self,
        site: SaveSite,
        lease: Lease,
        private: bool,
        stored: Stored,
        dtype: torch.dtype,
        decode: Callable[..., Tensor],
    ) -> None:
        super().__init__(site, lease, private)
        self.stored = stored
        self.dtype = dtype
        self.decode = decode

    def flat(self) -> Tensor:
        if self.private:
            self._check_consumer()
        return self.decode(self.stored, self.dtype)

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        if self.private:
            self._check_consumer()
        for start in self.stored.part_starts():
            yield start, self.decode(self.stored, self.dtype, start)

    def _check_consumer(self) -> None:
        node = torch._C._current_autograd_node()
        site = self.site
        if node is not None and not any(c.startswith(f"{node.name()}.") for c in site.consumers):
            raise RuntimeError(
                f"{node.name()} reads the tensor saved at {site.name}, which calibration saw read "
                f"by {site.consumer} alone. The model's graph changed in a way that daf_hf cannot "
                f"follow; exclude={[site.module]!r} stores it exactly."
            )


class Copy(Physical):
    """Elements held exactly, here or, with ``device``, for another device."""

    __slots__ = ("device", "elements")

    def __init__(
        self, site: SaveSite, elements: Tensor, lease: Lease, device: torch.device | None = None
    ) -> None:
        super().__init__(site, lease)
        self.elements = elements
        self.device = device or elements.device

    def flat(self) -> Tensor:
        return self.elements.to(self.device)

    def own(self) -> Tensor:
        return self.elements.to(self.device, copy=True)


class Drawn(Physical):
    """Dropout's noise, of which the generator's state is held.

    Args:
        site: the save site.
        lease: of the state.
        noise: what is drawn.
        draw: gives the next so many elements of a stream, of a dtype.
    """

    __slots__ = ("draw", "noise")

    def __init__(
        self,
        site: SaveSite,
        lease: Lease,
        noise: Noise,
        draw: Callable[[Stream, int, torch.dtype], Tensor],
    ) -> None:
        super().__init__(site, lease)
        self.noise = noise
        self.draw = draw

    def flat(self) -> Tensor:
        return self.draw(self.noise.begin(), self.noise.numel, self.noise.dtype)

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        noise, stream = self.noise, self.noise.begin()
        size = PART_ELEMENTS if stream.divisible else noise.numel
        for start in range(0, noise.numel, size):
            yield start, self.draw(stream, min(size, noise.numel - start), noise.dtype)


class Derived(Physical):
    """Elements that are evaluated again from others that are held.

    Args:
        site: the save site.
        expression: over physicals, and tensors that are the model's own.
        versions: of what the model may change in place; evaluating it then raises.
        dtype: of the elements.
    """

    __slots__ = ("dtype", "expression", "versions")

    def __init__(
        self, site: SaveSite, expression: Expression, versions: list[Version], dtype: torch.dtype
    ) -> None:
        super().__init__(site)
        self.expression = expression
        self.versions = versions
        self.dtype = dtype

    @property
    def operations(self) -> int:
        """Passes over the elements that restoring them takes."""
        return self.expression.operations

    def flat(self) -> Tensor:
        for version in self.versions:
            version.check()
        return self.expression.evaluate(_READER).to(self.dtype)


class _Reader(Reader):
    def parts(self, source: Physical | Tensor) -> Iterator[tuple[int, Tensor]]:
        if isinstance(source, Tensor):
            yield 0, source
        else:
            yield from source.parts()


_READER = _Reader(lambda source: source.clone() if isinstance(source, Tensor) else source.own())


class Spilled(Physical):
    """Elements in host memory (of an accelerator) or in a file (of a CPU)."""

    __slots__ = ("device", "dtype", "numel", "parcel")

    def __init__(self, site: SaveSite, flat: Tensor, spill: SpillFile) -> None:
        super().__init__(site)
        self.numel, self.dtype, self.device = flat.numel(), flat.dtype, flat.device
        self.parcel = Parcel(flat, spill)

    def flat(self) -> Tensor:
        out = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self.parcel.read(out)
        return out


class Refused(Physical):
    """Elements that there was no room for: restoring them raises."""

    __slots__ = ("refusal",)

    def __init__(self, site: SaveSite, refusal: Refusal) -> None:
        super().__init__(site)
        self.refusal = refusal

    def flat(self) -> Tensor:
        raise self.refusal.error()


class View(Handle):
    """A handle on a :class:`Physical` with the tensor's own shape and strides."""

    __slots__ = ("physical", "shape", "stride")

    def __init__(
        self,
        tensor: Tensor,
        shape: torch.Size,
        stride: tuple[int, ...],
        physical: Physical,
        lease: Lease,
    ) -> None:
        super().__init__(tensor, lease)
        self.physical = physical
        self.shape = shape
        self.stride = stride

    def _restore(self) -> Tensor:
        return self.physical.flat().as_strided(self.shape, self.stride)


class Note(NamedTuple):
    """Of a saved tensor: where it is, as long as anybody holds it."""

    physical: weakref.ref[Physical]
    shape: tuple[int, ...]
    version: Version | None


def source_of(packed: Any) -> Source | None:
    """What the elements of a handle or a note can be had from, if they lie row by row."""
    if isinstance(packed, View) and is_contiguous(packed.shape, packed.stride):
        return Source(packed.physical, tuple(packed.shape))
    if isinstance(packed, Kept) and is_ordinary(packed.tensor) and packed.tensor.is_contiguous():
        return Source(packed.tensor.view(-1), tuple(packed.tensor.shape))
    if isinstance(packed, Note):
        physical = packed.physical()
        return Source(physical, packed.shape) if physical is not None else None
    return None
