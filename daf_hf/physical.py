"""The elements behind handles: each stored once, in one of several ways."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .dropout import PART_ELEMENTS, Noise
from .expressions import Expression, Reader
from .kernels.noise import Stream
from .leases import Lease
from .refusal import Refusal
from .sites import SaveSite
from .spill import Parcel, SpillFile
from .stored import Stored
from .versions import Version


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


class Yielding(Copy):
    """Elements held exactly until room is needed for others; from then on in another place.

    Args:
        site: the save site.
        elements: of a dtype that may be encoded.
        cols: columns of the elements.
        lease: of the memory that holds them.
        cdata: the storage where it is held itself; None for a copy.

    Attributes:
        place: where the elements went; None while they are held exactly.
    """

    __slots__ = ("cdata", "cols", "place")

    def __init__(
        self, site: SaveSite, elements: Tensor, cols: int, lease: Lease, cdata: int | None
    ) -> None:
        super().__init__(site, elements, lease)
        self.cols = cols
        self.cdata = cdata
        self.place: Physical | None = None

    def move_to(self, place: Physical) -> None:
        """Let the exact elements go, if they have not gone before."""
        self.place = place  # first: another thread may be reading
        with suppress(AttributeError):
            del self.elements
        self.lease = None

    def flat(self) -> Tensor:
        if self.place is None:
            with suppress(AttributeError):  # moved since
                return super().flat()
        assert self.place is not None
        return self.place.flat()

    def own(self) -> Tensor:
        if self.place is None:
            with suppress(AttributeError):
                return super().own()
        assert self.place is not None
        return self.place.own()

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        place = self.place
        yield from super().parts() if place is None else place.parts()


class Narrow(Physical):
    """Integers held in a narrower dtype that has room for all of them."""

    __slots__ = ("dtype", "elements")

    def __init__(self, site: SaveSite, elements: Tensor, lease: Lease, dtype: torch.dtype) -> None:
        super().__init__(site, lease)
        self.elements = elements
        self.dtype = dtype

    def flat(self) -> Tensor:
        return self.elements.to(self.dtype)


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
