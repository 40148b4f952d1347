"""What autograd keeps in place of a saved tensor."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .expressions import Source
from .leases import Lease
from .physical import Physical
from .tensors import flatten, geometry, is_contiguous, is_ordinary
from .versions import Version


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


def source_of_tensor(tensor: Tensor) -> Source | None:
    """A tensor that is there anyhow, as a source, unless it has gaps in memory."""
    if not is_ordinary(tensor):
        return None
    shape, stride = tuple(tensor.shape), tensor.stride()
    extent, _, whole = geometry(shape, stride)
    row_by_row = is_contiguous(shape, stride)
    return Source(flatten(tensor, extent), shape, None if row_by_row else stride) if whole else None


def source_of(packed: Any) -> Source | None:
    """What the elements of a handle or a note can be had from, if that can be."""
    if isinstance(packed, View):
        row_by_row = is_contiguous(packed.shape, packed.stride)
        return Source(packed.physical, tuple(packed.shape), None if row_by_row else packed.stride)
    if isinstance(packed, Kept):
        return source_of_tensor(packed.tensor)
    if isinstance(packed, Note):
        physical = packed.physical()
        return Source(physical, packed.shape) if physical is not None else None
    return None
