"""Facts about single tensors: how they lie in memory, and what values they have."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]


MATCHED_ROW = 64
"""Elements of a row from which on two statistics of it cost little beside them."""

LARGEST = 1e18
"""Elements of which no plan knows are kept exactly if any is larger."""

HALVES = (torch.bfloat16, torch.float16)
NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)
WIDE = (torch.int16, torch.int32, torch.int64)


@lru_cache(maxsize=65536)
def geometry(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, tuple[int, ...], bool]:
    """Extent in memory, dimensions of the columns, and whether the extent is all there is to store.

    The extent of an expanded tensor is that of what was expanded; that of a slice with gaps is
    larger than its elements, and the slice must be copied together first.

    The columns are the dimension whose neighbours are adjacent in memory, and those that lie next
    to it in memory though a later one was moved in between, as the heads of attention do:
    ``[batch, heads, tokens, head size]``, made as ``[batch, tokens, heads, head size]``.
    """
    extent, elements = 1, 1
    for size, step in zip(shape, stride, strict=True):
        if size == 0:
            return 0, (), True
        extent += (size - 1) * step
        if step:
            elements *= size
    inner = sorted(
        (d for d in range(len(shape)) if stride[d] and shape[d] > 1), key=stride.__getitem__
    )
    found: list[int] = []
    step = 1
    for d in inner:
        moved = not found or any(d < other < min(found) for other in inner)
        if stride[d] != step or not moved:
            break
        found.append(d)
        step *= shape[d]
    return extent, tuple(found), extent <= elements


@lru_cache(maxsize=4096)
def operation(node: str) -> str:
    """The operation that an autograd node of this name belongs to."""
    return node.rstrip("0123456789").removesuffix("Backward")


def columns(shape: tuple[int, ...], dims: tuple[int, ...], numel: int) -> int:
    """Columns of ``numel`` elements; see :func:`geometry` (1 where there are none)."""
    size = math.prod(shape[d] for d in dims)
    return size if size and numel % size == 0 else 1


def are_rows(dims: tuple[int, ...], shape: tuple[int, ...], least: int = 1) -> bool:
    """Whether the columns are the last dimension alone, over which normalisations go, of at least
    so many elements.
    """
    return dims == (len(shape) - 1,) and shape[-1] >= least


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is a plain strided one with memory of its own."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not _functorch.is_functorch_wrapped_tensor(tensor)
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two flat, contiguous CPU tensors of a floating dtype hold the same bits.

    NumPy compares several times as fast as ``torch.equal``.
    """
    integers = torch.int16 if one.element_size() == 2 else torch.int32
    return np.array_equal(one.view(integers).numpy(), other.view(integers).numpy())


def may_be_two_valued(flat: Tensor) -> bool:
    """Whether the first elements have at most two values."""
    sample = flat[:256]
    others = sample[sample != sample[0]]
    return others.numel() == 0 or bool((others == others[0]).all())


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@lru_cache(maxsize=65536)
def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements of this shape and these strides lie row by row."""
    expected = contiguous_stride(shape)
    return all(size == 1 or a == b for size, a, b in zip(shape, stride, expected, strict=True))


def flatten(tensor: Tensor, extent: int) -> Tensor:
    """The ``extent`` elements of memory from the tensor's first one, as a 1-D view."""
    return tensor.detach().as_strided((extent,), (1,))


def is_two_valued(flat: Tensor) -> bool:
    """Exactly two values (a constant may just not have shown its other value yet)."""
    if not may_be_two_valued(flat):
        return False
    others = flat[flat != flat[0]]
    return others.numel() > 0 and bool((others == others[0]).all())


def is_representable(flat: Tensor, two_valued: bool) -> bool:
    """Whether encoding would succeed: at most two values, or a range that is finite in bf16."""
    if two_valued:
        return flat.unique().numel() <= 2
    low, high = (end.bfloat16().float() for end in flat.aminmax())
    return bool((high - low).isfinite())


def is_encodable(flat: Tensor) -> bool:
    """Whether every codec can represent the elements, those too that square them."""
    return float(flat.min()) > -LARGEST and float(flat.max()) < LARGEST if flat.numel() else True


def narrowest(flat: Tensor) -> torch.dtype:
    """The narrowest integer dtype that has room for every element; else the tensor's own."""
    if flat.dtype not in WIDE or not flat.numel():
        return flat.dtype
    low, high = (int(end) for end in flat.aminmax())
    fitting = (d for d in NARROW if torch.iinfo(d).min <= low and high <= torch.iinfo(d).max)
    return min(next(fitting, flat.dtype), flat.dtype, key=lambda dtype: dtype.itemsize)


def source_of_copy(tensor: Tensor, candidates: Iterable[Tensor | None]) -> Tensor | None:
    """The fp32 candidate that ``tensor``, of ``HALVES``, is a copy of to the last bit."""
    extent, _, whole = geometry(tensor.shape, tensor.stride())
    for candidate in candidates:
        if (
            whole
            and candidate is not None
            and candidate.numel() == extent
            and candidate.dtype is torch.float32
            and candidate.is_contiguous()
            and torch.equal(flatten(candidate, extent).to(tensor.dtype), flatten(tensor, extent))
        ):
            return candidate
    return None
