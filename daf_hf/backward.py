"""Running parts of a backward pass, and what their differences come to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

PassedOn = tuple[Any, int, "Tensor | None"]
"""To which node, as the gradient of which of its outputs, and what."""


def differences_between(a: list[PassedOn], b: list[PassedOn]) -> list[tuple[Any, int, Tensor]]:
    """What is passed on otherwise, and by how much."""
    return [
        (function, index, x - y)
        for (function, index, x), (_, _, y) in zip(a, b, strict=True)
        if not (function is None or x is None or y is None or torch.equal(x, y))
    ]


def below(
    differences: list[tuple[Any, int, Tensor]],
    parameters: list[nn.Parameter],
    leaves: Sequence[Tensor] | None = None,
) -> list[Tensor | None]:
    """What such differences change of the parameters' gradients; see :func:`gradients_of`."""
    changes: dict[Any, Tensor] = {}
    edges: dict[GradientEdge, Tensor] = {}
    for function, index, difference in differences:
        # The engine reduces what a broadcast passes on, and casts it.
        metadata = function._input_metadata[index]
        delta = difference.sum_to_size(metadata.shape).to(metadata.dtype)
        leaf = getattr(function, "variable", None)
        target, key = (edges, GradientEdge(function, index)) if leaf is None else (changes, leaf)
        target[key] = target[key] + delta if key in target else delta
    found: list[Tensor | None] = [None] * len(parameters)
    if edges:
        found = gradients_of(list(edges), parameters, list(edges.values()), leaves)
    return [
        _sum(gradient, changes.get(parameter))
        for gradient, parameter in zip(found, parameters, strict=True)
    ]


def gradients_of(
    outputs: Any,
    parameters: Sequence[Any],
    incoming: list[Tensor] | None,
    leaves: Sequence[Tensor] | None = None,
) -> list[Tensor | None]:
    """Gradients of the outputs, dense; the graph is kept.

    Args:
        outputs: tensors or edges.
        parameters: to differentiate by.
        incoming: gradients of the outputs; None for a scalar.
        leaves: of a graph with reentrant checkpoints, all that accumulate a gradient. Only
            ``backward()`` can run these; what it leaves behind is taken back.
    """
    if leaves is not None:
        with _own_gradients([*leaves, *parameters]):
            torch.autograd.backward(outputs, incoming, retain_graph=True)
            return [_dense(parameter.grad) for parameter in parameters]
    found = torch.autograd.grad(
        outputs, parameters, grad_outputs=incoming, retain_graph=True, allow_unused=True
    )
    return [_dense(gradient) for gradient in found]


@contextmanager
def _own_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Inside, leaves have no gradients, and nothing runs when they get one."""
    before = [
        (leaf, leaf.grad, hooks, dict(hooks))
        for leaf in {id(leaf): leaf for leaf in leaves}.values()
        for hooks in [leaf._post_accumulate_grad_hooks or {}]
    ]
    for leaf, _, hooks, _ in before:
        leaf.grad = None
        hooks.clear()
    try:
        yield
    finally:
        for leaf, gradient, hooks, known in before:
            leaf.grad = gradient
            hooks.update(known)


def outgoing(node: Any, incoming: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """What a node alone passes on, dense."""
    with torch.no_grad():
        passed = node(*incoming)
    return tuple(map(_dense, passed if isinstance(passed, tuple) else (passed,)))


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Gradients of sparse weights and embeddings lack most operations."""
    if gradient is None or gradient.layout is torch.strided:
        return gradient
    return gradient.to_dense()


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
