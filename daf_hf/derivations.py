"""Derived tensors: saved tensors that are functions of other saved ones.

Autograd's graph says how a tensor was made, and its nodes hold what the saved-tensor hooks packed
for them. So when a tensor is saved, it can be traced back to packed operands: what attention
multiplies the values with is the softmax's output times a dropout mask, and an adapter's input is
the output of a LayerNorm, from its saved input and statistics, times a mask. Such a tensor need
not be stored: it is evaluated again in backward.

The trace is exact: the operand is what that very node saved. A tensor whose trace meets an
operation that is not listed here, or operands that lie otherwise in memory, is not derived.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        "Alias",
        "Expand",
        "Permute",
        "ReshapeAlias",
        "Squeeze",
        "T",
        "Transpose",
        "Unsqueeze",
        "UnsafeView",
        "View",
    )
)
"""Nodes behind which the elements in memory are the same."""

CASTS = frozenset(["ToCopyBackward0"])
"""Nodes behind which they are the same in another precision."""

Resolve = Callable[[Any], "tuple[Any, int] | None"]
"""From what the hooks packed to a source and its number of elements; None where it cannot be one.
"""

Read = Callable[[Any], Tensor]
"""The flat elements of a source, in memory that the caller may change."""


class Expression(ABC):
    """How a tensor's elements follow from those of sources."""

    numel: int

    @abstractmethod
    def sources(self) -> Iterator[Any]:
        """What it is a function of."""

    @abstractmethod
    def evaluate(self, read: Read) -> Tensor:
        """The elements ``[numel]``, in memory of their own."""


@dataclass(frozen=True)
class Source(Expression):
    """A saved tensor itself."""

    saved: Any
    numel: int

    def sources(self) -> Iterator[Any]:
        yield self.saved

    def evaluate(self, read: Read) -> Tensor:
        return read(self.saved)


@dataclass(frozen=True)
class Product(Expression):
    """``left * right * scale``, element by element; either may be bool."""

    left: Expression
    right: Expression
    scale: float = 1.0

    @property
    def numel(self) -> int:
        return self.left.numel

    def sources(self) -> Iterator[Any]:
        yield from self.left.sources()
        yield from self.right.sources()

    def evaluate(self, read: Read) -> Tensor:
        left, right = self.left.evaluate(read), self.right.evaluate(read)
        product = left.mul_(right) if left.dtype.is_floating_point else right.mul_(left)
        return product if self.scale == 1.0 else product.mul_(self.scale)


@dataclass(frozen=True)
class LayerNorm(Expression):
    """``(x - mean) * rstd * weight + bias`` over rows of ``size`` elements.

    The statistics are those that the forward pass saved; weight and bias may be None.
    """

    x: Source
    mean: Source
    rstd: Source
    weight: Source | None
    bias: Source | None
    size: int

    @property
    def numel(self) -> int:
        return self.x.numel

    def sources(self) -> Iterator[Any]:
        for source in (self.x, self.mean, self.rstd, self.weight, self.bias):
            if source is not None:
                yield from source.sources()

    def evaluate(self, read: Read) -> Tensor:
        x = self.x.evaluate(read).float().view(-1, self.size)
        rstd = self.rstd.evaluate(read).float().view(-1, 1)
        shift = self.mean.evaluate(read).float().view(-1, 1) * -rstd
        torch.addcmul(shift, x, rstd, out=x)
        if self.weight is not None:
            x.mul_(self.weight.evaluate(read))
        if self.bias is not None:
            x.add_(self.bias.evaluate(read))
        return x.view(-1)


def derivation(tensor: Tensor, numel: int, resolve: Resolve) -> Expression | None:
    """How ``tensor``, which autograd is about to save, follows from what it has saved before.

    Args:
        tensor: with its ``grad_fn``.
        numel: its elements in memory.
        resolve: knows what the hooks packed.
    """
    found = _output((tensor.grad_fn, tensor.output_nr), resolve)
    # Its own node's saved output is not derived: that is where it is stored.
    if found is None or isinstance(found, Source) or found.numel != numel:
        return None
    return found


Edge = tuple[Any, int]
"""An autograd node, or None, and the number of its output."""


def _output(edge: Edge, resolve: Resolve) -> Expression | None:
    """What a node gave out, behind any views of it."""
    node, index = edge
    while node is not None and (node.name() in VIEWS or node.name() in CASTS):
        node, index = node.next_functions[0]
    if node is None or index:
        return None
    trace = _TRACES.get(node.name())
    return trace(node, resolve) if trace is not None else _saved(node, "result", resolve)


def _packed(node: Any, slot: str) -> Any:
    """What the hooks packed for a node; None where there is nothing."""
    return getattr(getattr(node, f"_raw_saved_{slot}", None), "data", None)


def _saved(node: Any, slot: str, resolve: Resolve) -> Source | None:
    packed = _packed(node, slot)
    found = resolve(packed) if packed is not None else None
    return Source(*found) if found is not None else None


def _mul(node: Any, resolve: Resolve) -> Expression | None:
    left, right = (
        _saved(node, slot, resolve) or _output(edge, resolve)
        for slot, edge in zip(("self", "other"), node.next_functions, strict=True)
    )
    return _product(left, right)


def _native_dropout(node: Any, resolve: Resolve) -> Expression | None:
    mask = _saved(node, "result1", resolve)
    return _product(_output(node.next_functions[0], resolve), mask, 1.0 / (1.0 - node._saved_p))


def _product(
    left: Expression | None, right: Expression | None, scale: float = 1.0
) -> Expression | None:
    if left is None or right is None or left.numel != right.numel:
        return None
    return Product(left, right, scale)


def _layer_norm(node: Any, resolve: Resolve) -> Expression | None:
    size = math.prod(node._saved_normalized_shape)
    slots = ("input", "result1", "result2", "weight", "bias")
    x, mean, rstd, weight, bias = (_saved(node, slot, resolve) for slot in slots)
    if x is None or mean is None or rstd is None:
        return None
    for parameter, slot in ((weight, "weight"), (bias, "bias")):
        if parameter is None and _packed(node, slot) is not None:
            return None
        if parameter is not None and parameter.numel != size:
            return None
    if not mean.numel * size == rstd.numel * size == x.numel:
        return None
    return LayerNorm(x, mean, rstd, weight, bias, size)


_TRACES: dict[str, Callable[[Any, Resolve], Expression | None]] = {
    "MulBackward0": _mul,
    "NativeDropoutBackward0": _native_dropout,
    "NativeLayerNormBackward0": _layer_norm,
}
