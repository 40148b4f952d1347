"""Elements that are saved several times over, as grouped-query attention repeats keys and values.

Each of a few key heads serves a group of query heads; where the attention kernel asks for one key
head per query head, the model expands them and copies the result, and that is what autograd saves:
several times the elements that there are (Ainslie et al. 2023, arXiv 2305.13245, section 2.2).
Here they are stored once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .derivations import VIEWS
from .physical import Physical
from .sites import SaveSite
from .tensors import contiguous_stride, geometry, operation

SMALLEST_ELEMENTS = 4096
"""Below which looking for repeats costs more than it saves."""


class Repeated(Physical):
    """Elements in memory of which each is stored once.

    Args:
        site: the save site.
        once: the stored ones.
        shape, stride: by which they are read, so that they are all there are, row by row.
    """

    __slots__ = ("once", "shape", "stride")

    def __init__(
        self, site: SaveSite, once: Physical, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> None:
        super().__init__(site, private=once.private)
        self.once, self.shape, self.stride = once, shape, stride

    def flat(self) -> Tensor:
        return spread_out(self.once.flat(), self.shape, self.stride)


def spread_out(once: Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """All elements, flat, of flat ones that are read with these strides, some of them 0."""
    return once.as_strided(shape, stride).reshape(-1)


def condensed(tensor: Tensor) -> Tensor | None:
    """A tensor that is expanded to the elements of ``tensor`` as they lie in memory.

    The graph shows the expansion; whether the elements are repeated is looked at.

    Args:
        tensor: that autograd is about to save.

    Returns:
        the elements in the same order, in a shape with a dimension for what is repeated, of stride
        0; None where nothing is.
    """
    copied = _copy_of_expanded(tensor.grad_fn) if tensor.numel() >= SMALLEST_ELEMENTS else None
    if copied is None:
        return None
    shape, expanded = copied
    extent, _, whole = geometry(tensor.shape, tensor.stride())
    if not whole or extent != math.prod(shape):
        return None
    full = tensor.detach().as_strided(shape, contiguous_stride(shape))
    dims = [
        d for d, (after, before) in enumerate(zip(shape, expanded, strict=True)) if after > before
    ]
    once = full
    for d in dims:
        once = once.narrow(d, 0, 1)
    # Before it are the heads, behind it tokens: the heads of a token are the columns of a row.
    heads = max(dims[0] - 1, 0)
    inwards = max(heads, len(shape) - 2)
    once = once.movedim(heads, inwards).clone(memory_format=torch.contiguous_format)
    found = once.movedim(inwards, heads).expand(shape)
    return found if torch.equal(found, full) else None


def _copy_of_expanded(node: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Of what a node gave out, if it is the copy of an expanded tensor: its shape, and the shape
    before the expansion.
    """
    while node is not None and operation(node.name()) in VIEWS:
        node = node.next_functions[0][0]
    if node is None or operation(node.name()) != "Clone":
        return None
    shape = tuple(node._input_metadata[0].shape)
    node = node.next_functions[0][0]
    if node is None or operation(node.name()) != "Expand":
        return None
    before = tuple(int(size) for size in node._saved_self_sym_sizes)
    before = (1,) * (len(shape) - len(before)) + before
    return (shape, before) if before != shape else None
