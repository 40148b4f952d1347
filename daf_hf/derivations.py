"""Derived tensors: saved tensors that are functions of other saved ones.

Autograd's graph says how a tensor was made, and its nodes hold what the saved-tensor hooks packed
for them. So when a tensor is saved, it can be traced back to packed operands: what attention
multiplies the values with is the softmax's output times a dropout mask, and an adapter's input is
the output of a LayerNorm, from its saved input and statistics, times a mask. Such a tensor need
not be stored: it is evaluated again in backward.

The trace is exact: the operand is what that very node saved. A tensor whose trace meets an
operation that is not listed here, or operands that lie otherwise in memory, is not derived. What
the graph does not show, a change of an intermediate result behind autograd's back, the elements
do: they are compared, all in calibration and a few in every step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .tensors import operation

CASTS = frozenset(["ToCopy"])
"""Operations behind which the elements are the same in another precision."""

RESHAPES = frozenset(["Alias", "ReshapeAlias", "Squeeze", "Unsqueeze", "UnsafeView", "View"])
"""Operations behind which they are the same, in the same order."""

VIEWS = RESHAPES | {"Expand", "Permute", "T", "Transpose"}
"""Operations behind which they are the same in memory."""

Resolve = Callable[[Any], "tuple[Any, int] | None"]
"""From what the hooks packed to a source and its number of elements; None where it cannot be one.
"""

WITNESSES = 17
"""Elements of a tensor by which a derivation is confirmed in each step; a prime, lest they all
lie in the same columns.
"""

TOLERANCE = 1e-4
"""How far elements may be off, relative to the largest (four roundings in low precision)."""


@lru_cache(maxsize=4096)
def witnesses(numel: int) -> Tensor:
    """Positions of a tensor's witnesses.

    Those of row statistics are those of the rows in which the elements' witnesses are.
    """
    return torch.tensor([index * numel // WITNESSES for index in range(WITNESSES)])


class Reader:
    """Reads the flat elements of sources, or their witnesses.

    Args:
        whole: gives all of a source's, in memory that the caller may change.
    """

    def __init__(self, whole: Callable[[Any], Tensor]) -> None:
        self.whole = whole

    def parts(self, source: Any) -> Iterator[tuple[int, Tensor]]:
        """The same in parts, each with the position of its first element."""
        yield 0, self.whole(source)


class Expression(ABC):
    """How a tensor's elements follow from those of sources."""

    numel: int

    @abstractmethod
    def sources(self) -> Iterator[Any]:
        """What it is a function of."""

    @abstractmethod
    def evaluate(self, read: Reader, at: Tensor | None = None) -> Tensor:
        """The elements, in memory of their own.

        Args:
            read: the sources' elements.
            at: ``int64 [k]`` positions, when ``read`` gives the elements at these alone.
        """

    def parts(self, read: Reader, at: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """The same in parts, each with the position of its first element."""
        yield 0, self.evaluate(read, at)

    def agrees(self, flat: Tensor, read: Reader, at: Tensor | None = None) -> bool:
        """Whether the elements ``flat`` (those at ``at`` alone, if given) are what it says."""
        exact = (flat if at is None else flat[at]).float()
        largest = exact.abs().max().nan_to_num(0.0, 0.0)
        tolerance = max(TOLERANCE, 4 * torch.finfo(flat.dtype).eps) * float(largest)
        try:
            value = self.evaluate(read, at).float()
        except RuntimeError:  # types or sizes that do not go together
            return False
        return torch.allclose(value, exact, rtol=0.0, atol=tolerance, equal_nan=True)


@dataclass(frozen=True)
class Source(Expression):
    """A saved tensor itself."""

    saved: Any
    numel: int

    def sources(self) -> Iterator[Any]:
        yield self.saved

    def evaluate(self, read: Reader, at: Tensor | None = None) -> Tensor:
        return read.whole(self.saved)

    def parts(self, read: Reader, at: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        yield from read.parts(self.saved)


@dataclass(frozen=True)
class Product(Expression):
    """``left * right * scale``, element by element; either may be a mask of bool or integers."""

    left: Expression
    right: Expression
    scale: float = 1.0

    @property
    def numel(self) -> int:
        return self.left.numel

    def sources(self) -> Iterator[Any]:
        yield from self.left.sources()
        yield from self.right.sources()

    def evaluate(self, read: Reader, at: Tensor | None = None) -> Tensor:
        left, right = self.left, self.right
        product = left.evaluate(read, at)
        if not product.dtype.is_floating_point:  # a mask: the other one is what can hold the result
            left, right = right, left
            product = left.evaluate(read, at)
        # The two need not be in memory whole at the same time.
        for start, part in right.parts(read, at):
            product[start : start + len(part)].mul_(part)
        return product if self.scale == 1.0 else product.mul_(self.scale)


@dataclass(frozen=True)
class LayerNorm(Expression):
    """``(x - mean) * rstd * weight + bias`` over rows of ``size`` elements.

    The statistics are those that the forward pass saved; weight and bias ``[size]`` or None.
    """

    x: Source
    mean: Source
    rstd: Source
    weight: Tensor | None
    bias: Tensor | None
    size: int

    @property
    def numel(self) -> int:
        return self.x.numel

    def sources(self) -> Iterator[Any]:
        for source in (self.x, self.mean, self.rstd):
            yield from source.sources()

    def evaluate(self, read: Reader, at: Tensor | None = None) -> Tensor:
        columns = self.size if at is None else 1
        x = self.x.evaluate(read, at).float().view(-1, columns)
        rstd = self.rstd.evaluate(read, at).float().view(-1, 1)
        shift = self.mean.evaluate(read, at).float().view(-1, 1) * -rstd
        torch.addcmul(shift, x, rstd, out=x)
        for parameter, apply in ((self.weight, x.mul_), (self.bias, x.add_)):
            if parameter is not None:
                apply(parameter if at is None else parameter[at % self.size, None])
        return x.view(-1)


def derivation(tensor: Tensor, numel: int, resolve: Resolve) -> Expression | None:
    """How ``tensor``, which autograd is about to save, follows from what it has saved before.

    Args:
        tensor: with its ``grad_fn``.
        numel: its elements in memory.
        resolve: knows what the hooks packed.
    """
    found = _output((tensor.grad_fn, tensor.output_nr), resolve, VIEWS)
    # Its own node's saved output is not derived: that is where it is stored.
    if found is None or isinstance(found, Source) or found.numel != numel:
        return None
    return found


Edge = tuple[Any, int]
"""An autograd node, or None, and the number of its output."""


def _output(edge: Edge, resolve: Resolve, views: frozenset[str] = RESHAPES) -> Expression | None:
    """What a node gave out, behind any views of it."""
    node, index = edge
    while node is not None and operation(node.name()) in views | CASTS:
        node, index = node.next_functions[0]
    if node is None or index:
        return None
    trace = _TRACES.get(operation(node.name()))
    return trace(node, resolve) if trace is not None else _saved(node, "result", resolve)


def _packed(node: Any, slot: str) -> Any:
    """What the hooks packed for a node; None where there is nothing, or nothing any more."""
    try:
        return getattr(getattr(node, f"_raw_saved_{slot}", None), "data", None)
    except RuntimeError:
        return None


def _saved(node: Any, slot: str, resolve: Resolve) -> Source | None:
    packed = _packed(node, slot)
    found = resolve(packed) if packed is not None else None
    return Source(*found) if found is not None else None


def _mul(node: Any, resolve: Resolve) -> Expression | None:
    if len(node.next_functions) != 2:  # times a number
        return None
    left, right = (
        _output(edge, resolve) if _packed(node, slot) is None else _saved(node, slot, resolve)
        for slot, edge in zip(("self", "other"), node.next_functions, strict=True)
    )
    return _product(left, right)


def _native_dropout(node: Any, resolve: Resolve) -> Expression | None:
    mask = _saved(node, "result1", resolve)
    if node._saved_p >= 1.0:
        return None
    return _product(_output(node.next_functions[0], resolve), mask, 1.0 / (1.0 - node._saved_p))


def _product(
    left: Expression | None, right: Expression | None, scale: float = 1.0
) -> Expression | None:
    if left is None or right is None or left.numel != right.numel:
        return None
    return Product(left, right, scale)


def _layer_norm(node: Any, resolve: Resolve) -> Expression | None:
    size = math.prod(node._saved_normalized_shape)
    x, mean, rstd = (_saved(node, slot, resolve) for slot in ("input", "result1", "result2"))
    if x is None or mean is None or rstd is None:
        return None
    parameters = []
    for slot in ("weight", "bias"):
        found = _saved(node, slot, resolve)
        # Parameters are kept as they are; a weight that was computed is not followed further.
        if found is None and _packed(node, slot) is None:
            parameters.append(None)
        elif found is not None and isinstance(found.saved, Tensor) and found.numel == size:
            parameters.append(found.saved)
        else:
            return None
    if not mean.numel * size == rstd.numel * size == x.numel:
        return None
    return LayerNorm(x, mean, rstd, parameters[0], parameters[1], size)


_TRACES: dict[str, Callable[[Any, Resolve], Expression | None]] = {
    "Mul": _mul,
    "NativeDropout": _native_dropout,
    "NativeLayerNorm": _layer_norm,
}
