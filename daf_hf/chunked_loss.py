"""Reductions over a vocabulary, chunk by chunk: the logits are never there as a whole.

Logits are a function of single rows: ``f(h W^T + b)`` with the hidden state ``h`` of one token and
a chain ``f`` of operations that look at one row alone, such as a soft-cap or a log-softmax. What
is reduced over the vocabulary can thus be computed from a few rows at a time, and so can its
gradient: by the same operations on the same rows, so that both equal those of whole logits to
rounding. That loss and gradient can be had so is known from Liger-Kernel (Hsu et al. 2024,
arXiv 2410.10989) and Cut Cross-Entropy (Wijmans et al. 2024, arXiv 2411.09009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, linear

from .liger import fused_loss

CHUNK_ELEMENTS = 1 << 23
"""Logits that are there at a time."""

RowOperation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Cast:
    """The row operation that gives another dtype."""

    dtype: torch.dtype

    def __call__(self, rows: Tensor) -> Tensor:
        return rows.to(self.dtype)


@dataclass(frozen=True)
class RowFunction:
    """The way from hidden states to what is reduced, row by row.

    Attributes:
        operations: what follows the head; each maps ``[rows, vocabulary]`` to the same shape.
        device_type, autocast: the autocast dtype that all runs under on that kind of device; None
            for none.
    """

    operations: tuple[RowOperation, ...] = ()
    device_type: str = "cpu"
    autocast: torch.dtype | None = None

    @staticmethod
    def here(hidden: Tensor) -> RowFunction:
        """The head alone, under what autocast is on now."""
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return RowFunction(device_type=kind, autocast=dtype)

    def then(self, operation: RowOperation) -> RowFunction:
        return replace(self, operations=(*self.operations, operation))

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Map hidden states ``[..., width]`` to ``[..., vocabulary]``."""
        return self.after(self.head(hidden, weight, bias))

    def head(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What comes before the operations."""
        with self.autocasting():
            return linear(hidden, weight, bias)

    def after(self, rows: Tensor) -> Tensor:
        """Apply the operations alone."""
        with self.autocasting():
            for operation in self.operations:
                rows = operation(rows)
        return rows

    def is_head_in_float32(self, hidden: Tensor) -> bool:
        """Whether values are the head's, and nothing more, as float32."""
        dtype = self.autocast or hidden.dtype
        casts = all(operation == Cast(torch.float32) for operation in self.operations)
        return casts and (bool(self.operations) or dtype == torch.float32)

    def cast(self, parameter: Tensor | None) -> Tensor | None:
        """A parameter as all chunks take it: without history, cast once."""
        if parameter is None:
            return None
        return parameter.detach().to(self.autocast or parameter.dtype)

    def autocasting(self) -> Any:
        """The context in which all runs."""
        if self.autocast is None:
            return torch.autocast(self.device_type, enabled=False)
        return torch.autocast(self.device_type, dtype=self.autocast)


def summed_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    function: RowFunction,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy summed over tokens, a scalar.

    The gradient of the hidden states is computed with it, chunk by chunk, and saved in place of
    the logits; that of a head that is trained needs the logits a second time, in backward.

    Args:
        hidden: ``[tokens, width]``.
        weight: of the head, ``[vocabulary, width]``.
        bias: of the head, ``[vocabulary]``, or None.
        function: from hidden states to logits.
        targets: ``[tokens]``, int64.
        ignore_index: as for :func:`torch.nn.functional.cross_entropy`.
        label_smoothing: as for :func:`torch.nn.functional.cross_entropy`.
    """
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return _SummedLoss.apply(hidden, weight, bias, function, targets, options)  # type: ignore


def reduced(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    function: RowFunction,
    reduce: Callable[[Tensor, Tensor], Tensor],
    index: Tensor,
) -> Tensor:
    """Return ``reduce(rows, index of these rows)`` for all rows, ``[tokens, ...]``.

    Backward computes the rows a second time.

    Args:
        hidden: ``[tokens, width]``.
        weight: of the head, ``[vocabulary, width]``.
        bias: of the head, ``[vocabulary]``, or None.
        function: from hidden states to rows.
        reduce: from ``[n, vocabulary]`` and ``[n, ...]`` to ``[n, ...]``, row by row.
        index: ``[tokens, ...]``, not floating-point.
    """
    return _Reduced.apply(hidden, weight, bias, function, reduce, index)  # type: ignore


def chunk_rows(vocabulary: int) -> int:
    """How many rows are evaluated at a time."""
    return max(1, CHUNK_ELEMENTS // vocabulary)


def once(backward: Callable[..., Any]) -> Any:
    """A backward pass that has none of its own: to ask for it raises at once.

    ``once_differentiable`` would let pass what depends on the gradient's inputs alone.
    """
    without = once_differentiable(backward)

    @wraps(backward)
    def checked(ctx: Any, *incoming: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of gradients (create_graph=True) need logits that are there as a "
                "whole; use chunked_loss=False"
            )
        return without(ctx, *incoming)

    return checked


class _SummedLoss(Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, function, targets, options) -> Tensor:
        head = (function.cast(weight), function.cast(bias))
        fused = fused_loss(hidden.device) if function.is_head_in_float32(hidden) else None
        if fused is not None:
            found = _fused(fused, hidden, head, function, targets, options)
        else:
            found = _chunk_by_chunk(hidden, head, function, targets, options)
        total, gradient = found
        ctx.function, ctx.options = function, options
        ctx.trained = any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(
            gradient, *((hidden, weight, bias, targets) if ctx.trained else (None,) * 4)
        )
        return total

    @staticmethod
    @once
    def backward(ctx: Any, incoming: Tensor) -> Any:
        gradient, hidden, weight, bias, targets = ctx.saved_tensors
        found: list[Tensor | None] = [None, None]
        if ctx.trained:
            kept = (targets != ctx.options["ignore_index"]).nonzero().squeeze(1)

            def loss(logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
                summed = cross_entropy(logits, targets[rows], reduction="sum", **ctx.options)
                return summed, incoming.to(summed.dtype)

            found = _again(ctx, hidden, (weight, bias), kept, loss)
        return gradient * incoming if gradient is not None else None, *found, None, None, None


def _chunk_by_chunk(
    hidden: Tensor,
    head: tuple[Any, Any],
    function: RowFunction,
    targets: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The loss, and its gradient by the hidden states where these have one."""
    kept = (targets != options["ignore_index"]).nonzero().squeeze(1)
    needed = hidden.requires_grad
    gradient = torch.zeros_like(hidden) if needed else None
    total = torch.zeros((), dtype=_summed_in(hidden.dtype), device=hidden.device)
    for rows in kept.split(chunk_rows(head[0].shape[0])):
        logits = function.head(hidden[rows], *head)
        with own_graph():
            values = function.after(logits.requires_grad_(needed))
            loss = cross_entropy(values, targets[rows], reduction="sum", **options)
            of_logits = torch.autograd.grad(loss, logits)[0] if needed else None
        if gradient is not None and of_logits is not None:
            gradient[rows] = (of_logits @ head[0]).to(gradient.dtype)
        total += loss.detach()
    return total.to(loss.dtype), gradient


def _fused(
    by: Callable[..., Tensor],
    hidden: Tensor,
    head: tuple[Any, Any],
    function: RowFunction,
    targets: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The same, in Liger-Kernel's kernels."""
    needed = hidden.requires_grad
    hidden = hidden.detach().requires_grad_(needed)
    with own_graph(), function.autocasting():
        weight, bias = head
        loss = by(hidden, weight, targets.long(), bias=bias, reduction="sum", **options)
        return loss.detach(), torch.autograd.grad(loss, hidden)[0] if needed else None


class _Reduced(Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, function, reduce, index) -> Tensor:
        head = (function.cast(weight), function.cast(bias))
        size = chunk_rows(weight.shape[0])
        chunks = zip(hidden.split(size), index.split(size), strict=True)
        found = [reduce(function(states, *head), chosen) for states, chosen in chunks]
        ctx.function, ctx.reduce = function, reduce
        ctx.save_for_backward(hidden, weight, bias, index)
        return torch.cat(found)

    @staticmethod
    @once
    def backward(ctx: Any, incoming: Tensor) -> Any:
        hidden, weight, bias, index = ctx.saved_tensors
        of_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None

        def result(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            return ctx.reduce(values, index[rows]), incoming[rows]

        rows = torch.arange(len(hidden), device=hidden.device)
        of_head = _again(ctx, hidden, (weight, bias), rows, result, of_hidden)
        return of_hidden, *of_head, None, None, None


def _again(
    ctx: Any,
    hidden: Tensor,
    head: tuple[Any, Any],
    kept: Tensor,
    result: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    of_hidden: Tensor | None = None,
) -> list[Tensor | None]:
    """Compute chunks again, and return the gradients of the head, where they are needed.

    ``result(values, rows)`` gives what is computed from the values of some rows, and the gradient
    of that. Gradients of the head are summed in float32; those of the hidden states are written to
    ``of_hidden`` where it is given.
    """
    weight, bias = (ctx.function.cast(parameter) for parameter in head)
    sums = [
        torch.zeros_like(parameter, dtype=_summed_in(parameter.dtype)) if wanted else None
        for parameter, wanted in zip(head, ctx.needs_input_grad[1:3], strict=True)
    ]
    of_weight, of_bias = sums
    for rows in kept.split(chunk_rows(len(weight))):
        states = hidden[rows]
        logits = ctx.function.head(states, weight, bias)
        with own_graph():
            found, incoming = result(ctx.function.after(logits.requires_grad_()), rows)
            (of_logits,) = torch.autograd.grad(found, logits, incoming)
        if of_hidden is not None:
            of_hidden[rows] = (of_logits @ weight).to(of_hidden.dtype)
        if of_weight is not None:
            of_weight.addmm_(of_logits.t().to(of_weight.dtype), states.to(of_weight.dtype))
        if of_bias is not None:
            of_bias += of_logits.sum(0)
    return [
        total.to(parameter.dtype) if total is not None and parameter is not None else None
        for total, parameter in zip(sums, head, strict=True)
    ]


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 where that is what is summed."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def own_graph() -> Iterator[None]:
    """Record a graph that is gone again at once: nobody else's hooks see what it saves."""
    with torch.enable_grad(), saved_tensors_hooks(_same, _same):
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor
