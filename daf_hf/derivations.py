"""Derived tensors: saved tensors that are functions of other saved ones.

Autograd's graph says how a tensor was made, and its nodes hold what the saved-tensor hooks packed
for them. So when a tensor is saved, it can be traced back to packed operands: what attention
multiplies the values with is the softmax's output times a dropout mask, and an adapter's input is
the output of a normalisation, from its saved input and statistics, times a mask. Such a tensor
need not be stored: it is evaluated again in backward.

The trace is exact: the operand is what that very node saved, or what was saved of that very
node's output. A tensor whose trace meets an operation that is not listed here, or operands that
lie otherwise in memory, is not derived. What the graph does not show, a change of an intermediate
result behind autograd's back, the elements do: they are compared, all in calibration and a few in
every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .attention import INPUTS, KERNELS, SUMS, Attended, Attention
from .expressions import (
    Expression,
    Function,
    LayerNorm,
    Product,
    Scaled,
    Shifted,
    Source,
    Sum,
)
from .tensors import is_contiguous, operation

CASTS = frozenset(["ToCopy"])
"""Operations behind which the elements are the same in another precision."""

RESHAPES = frozenset(["Alias", "ReshapeAlias", "Squeeze", "Unsqueeze", "UnsafeView", "View"])
"""Operations behind which they are the same, in the same order."""

VIEWS = RESHAPES | {"Expand", "Permute", "T", "Transpose"}
"""Operations behind which they are the same in memory."""

Resolve = Callable[[Any], "Source | None"]
"""From what the hooks packed, or what :func:`remember` was given, to a source."""

MOST_OPERATIONS = 16
"""Beyond so many, those that sources take included, evaluating costs more than it is worth."""

_KEY = "daf_hf"

Edge = tuple[Any, int]
"""An autograd node, or None, and the number of its output."""


def derivation(tensor: Tensor, numel: int, resolve: Resolve) -> Expression | None:
    """How ``tensor``, which autograd is about to save, follows from what it has saved before.

    Args:
        tensor: with its ``grad_fn``.
        numel: its elements in memory.
        resolve: knows what the hooks packed.
    """
    found = _Trace(resolve).root((tensor.grad_fn, tensor.output_nr))
    # What is saved already is not derived: that is where it is stored.
    if found is None or isinstance(found, Source) or found.numel != numel:
        return None
    return found if found.operations <= MOST_OPERATIONS else None


def is_certain(tensor: Tensor) -> bool:
    """Whether a tensor is the output of an operation that saves itself all that it follows from."""
    node = tensor.grad_fn
    return node is not None and operation(node.name()) in KERNELS and not tensor.output_nr


def row_sums(tensor: Tensor, expression: Expression | None) -> tuple[Any, Expression] | None:
    """Of the output of fused attention: what the hooks packed for its row sums, which the kernel
    saves before, and how they follow.
    """
    if not isinstance(expression, Attention):
        return None
    packed = packed_for(tensor, "logsumexp")
    return None if packed is None else (packed, replace(expression, which=SUMS))


def packed_for(tensor: Tensor, slot: str) -> Any:
    """What the hooks packed for a slot of the node that made a tensor; None where there is none."""
    return _packed(tensor.grad_fn, slot)


def remember(tensor: Tensor, packed: Any) -> None:
    """Note for later traces that ``tensor``, an operation's output, was saved.

    Args:
        tensor: with its ``grad_fn``, whose node keeps the note.
        packed: for ``resolve``; it must not keep the graph alive.
    """
    node: Any = tensor.grad_fn
    if node is not None and is_contiguous(tuple(tensor.shape), tensor.stride()):
        node.metadata[f"{_KEY}.{tensor.output_nr}"] = packed


class _Trace:
    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._operations_left = MOST_OPERATIONS

    def root(self, edge: Edge) -> Expression | None:
        """What the tensor is that is being saved."""
        node, index = _behind(edge, VIEWS | CASTS)
        if node is None or index or isinstance(node, torch._C._FunctionBase):
            return None
        if operation(node.name()) in KERNELS:  # its own output alone: nothing confirms a copy
            return _attention(self, node) if node is edge[0] else None
        if operation(node.name()) == "Add" and [*node.next_functions, (None, 0)][1][0] is None:
            x = self.output(node.next_functions[0])
            return None if x is None else Shifted(x)
        return self._made_by(node, saved=False)

    def output(self, edge: Edge) -> Expression | None:
        """What a node gave out, behind any reshapes of it."""
        while True:
            node, index = edge
            if node is None:
                return None
            found = self._remembered(node, index)
            if found is not None:
                return found
            if operation(node.name()) not in RESHAPES | CASTS:
                break
            edge = node.next_functions[0]
        return None if index else self._made_by(node, saved=True)

    def _remembered(self, node: Any, index: int) -> Source | None:
        packed = node.metadata.get(f"{_KEY}.{index}")
        found = self._resolve(packed) if packed is not None else None
        return found if found is not None and found.stride is None else None

    def _made_by(self, node: Any, saved: bool) -> Expression | None:
        """A node's output; its own saved output will do where ``saved``."""
        if isinstance(node, torch._C._FunctionBase):  # written in Python, whatever its name
            return None
        found = self.saved(node, "result") if saved else None
        trace = _TRACES.get(operation(node.name()))
        self._operations_left -= 1
        if found is not None or trace is None or self._operations_left < 0:
            return found
        return trace(self, node)

    def saved(self, node: Any, slot: str) -> Source | None:
        """What a node saved."""
        found = self.laid_out(node, slot)
        return found if found is not None and found.stride is None else None

    def laid_out(self, node: Any, slot: str) -> Source | None:
        """The same, whatever its strides."""
        packed = _packed(node, slot)
        return self._resolve(packed) if packed is not None else None

    def operand(self, node: Any, slot: str, number: int) -> Expression | None:
        """An operand of a node: what it saved, else what the node before gave out."""
        if _packed(node, slot) is not None:
            return self.saved(node, slot)
        return self.output(node.next_functions[number])


def _behind(edge: Edge, views: frozenset[str]) -> Edge:
    node, index = edge
    while node is not None and operation(node.name()) in views:
        node, index = node.next_functions[0]
    return node, index


def _packed(node: Any, slot: str) -> Any:
    """What the hooks packed for a node; None where there is nothing, or nothing any more."""
    try:
        return getattr(getattr(node, f"_raw_saved_{slot}", None), "data", None)
    except RuntimeError:
        return None


def _mul(trace: _Trace, node: Any) -> Expression | None:
    number = _number(node)
    if number is not None:
        x = trace.output(node.next_functions[0])
        return None if x is None else Scaled(x, number)
    if len(node.next_functions) != 2:
        return None
    left = trace.operand(node, "self", 0)
    right = trace.operand(node, "other", 1) if left is not None else None
    if left is None or right is None:
        return None
    if left.numel < right.numel:
        left, right = right, left
    if left.numel == right.numel:
        return Product(left, right)
    return _broadcast(left, right, tuple(node._input_metadata[0].shape))


def _number(node: Any) -> float | None:
    """The number that a node multiplies by, if it is one."""
    if len(node.next_functions) > 1:
        if node.next_functions[1][0] is not None:
            return None
        other = _packed(node, "other")  # numbers do not pass through hooks
    else:
        other = node._saved_other
    if isinstance(other, Tensor):
        return float(other) if not other.dim() and not other.is_complex() else None
    return float(other) if isinstance(other, (int, float)) else None


def _broadcast(x: Expression, factors: Expression, shape: tuple[int, ...]) -> Expression | None:
    """``x``, of this shape, times one factor a row or a column."""
    if not isinstance(factors, Source) or x.numel != math.prod(shape):
        return None
    own = factors.shape
    if isinstance(factors.saved, Tensor) and own == shape[len(shape) - len(own) :]:
        return Scaled(x, columns=factors.saved)
    if own == (*shape[:-1], 1) or factors.numel == 1:
        return Scaled(x, rows=factors)
    return None


def _native_dropout(trace: _Trace, node: Any) -> Expression | None:
    x, mask = trace.output(node.next_functions[0]), trace.saved(node, "result1")
    if x is None or mask is None or x.numel != mask.numel or node._saved_p >= 1.0:
        return None
    return Product(x, mask, 1.0 / (1.0 - node._saved_p))


def _add(trace: _Trace, node: Any) -> Expression | None:
    if len(node.next_functions) != 2:  # a number, which the graph does not keep
        return None
    left = trace.output(node.next_functions[0])
    right = trace.output(node.next_functions[1]) if left is not None else None
    if left is None or right is None or left.numel != right.numel:
        return None
    # Terms of one tensor. Along a residual stream one layer's input would follow from that of the
    # layer before, and that from the one before it.
    if len({id(source) for source in (*left.sources(), *right.sources())}) > 1:
        return None
    return Sum(left, right, float(node._saved_alpha))


def _layer_norm(trace: _Trace, node: Any) -> Expression | None:
    size = math.prod(node._saved_normalized_shape)
    x, mean, rstd = (trace.saved(node, slot) for slot in ("input", "result1", "result2"))
    if x is None or mean is None or rstd is None:
        return None
    parameters = []
    for slot in ("weight", "bias"):
        found = trace.saved(node, slot)
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


def _attention(trace: _Trace, node: Any) -> Expression | None:
    mask = None
    if _packed(node, "attn_mask") is not None:
        mask = trace.laid_out(node, "attn_mask")
        if mask is None:
            return None
    inputs = [trace.laid_out(node, slot) for slot in INPUTS]
    if not all(inputs) or node._saved_dropout_p:
        return None
    kernel = KERNELS[operation(node.name())]
    known = tuple(source for source in inputs if source is not None)
    return Attention(Attended(kernel, known, mask, node._saved_is_causal, node._saved_scale))


def _pow(trace: _Trace, node: Any) -> Expression | None:
    if not node.name().endswith("Backward0"):  # the exponent is a tensor
        return None
    exponent = node._saved_exponent
    if not isinstance(exponent, (int, float)):
        return None
    return _function(trace, node, partial(torch.pow, exponent=exponent))


def _gelu(trace: _Trace, node: Any) -> Expression | None:
    return _function(trace, node, partial(functional.gelu, approximate=node._saved_approximate))


def _function(trace: _Trace, node: Any, apply: Callable[[Tensor], Tensor]) -> Expression | None:
    x = trace.operand(node, "self", 0)
    return None if x is None else Function(x, apply)


_TRACES: dict[str, Callable[[_Trace, Any], Expression | None]] = {
    "Add": _add,
    "Gelu": _gelu,
    "Mul": _mul,
    "NativeDropout": _native_dropout,
    "NativeLayerNorm": _layer_norm,
    "Pow": _pow,
    "Sigmoid": partial(_function, apply=torch.sigmoid),
    "Silu": partial(_function, apply=functional.silu),
    "Tanh": partial(_function, apply=torch.tanh),
}
