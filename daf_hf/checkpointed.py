"""Checkpointed regions: what is saved for them, and which of a graph's nodes run them again.

A region's inputs are saved before it runs: where it is reentrant by an autograd function of the
checkpoint's own, else (``torch.utils.checkpoint`` with ``use_reentrant=False``) by the checkpoint
itself, for no node of the graph. What the region saves inside is not seen in the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils import checkpoint as _checkpoint

EXACT_BITS = 32
"""Where no fewer bits will do: kept exactly, or encoded without loss."""

LEAST_BITS = (0, 8, EXACT_BITS)
"""What a save site may need at the least."""

_TORCH = _checkpoint.__name__
_FUNCTION = "torch.autograd.function"


def saves_inputs(frame: FrameType | None) -> bool:
    """Whether the frame that saves a tensor does so for a region that it will run again.

    Args:
        frame: the Python frame that called the operation.
    """
    while frame is not None and frame.f_globals.get("__name__") == _FUNCTION:
        if _is_name_of_one(getattr(frame.f_locals.get("cls"), "__name__", "")):
            return True
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _TORCH


def runs_again(node: Any) -> bool:
    """Whether a node runs a region again and goes through its graph (a reentrant checkpoint).

    Such regions can be run by ``backward()`` alone, not by ``torch.autograd.grad``.
    """
    return isinstance(node, torch._C._FunctionBase) and _is_name_of_one(type(node).__name__)


@contextmanager
def repeatable() -> Iterator[None]:
    """Inside, selective checkpoints select nothing: what they have kept they give back only once.

    A graph is otherwise the same, and so are its gradients.
    """
    original: Any = _checkpoint._checkpoint_without_reentrant_generator

    def generator(fn: Any, preserve: bool, context_fn: Callable[[], Any], *rest: Any, **kw: Any):
        contexts = context_fn()
        selects = isinstance(contexts[1], _checkpoint._CachedTorchDispatchMode)
        chosen = _checkpoint.noop_context_fn if selects else lambda: contexts
        return original(fn, preserve, chosen, *rest, **kw)

    _checkpoint._checkpoint_without_reentrant_generator = generator
    try:
        yield
    finally:
        _checkpoint._checkpoint_without_reentrant_generator = original


def _is_name_of_one(function: str) -> bool:
    """Torch's, DeepSpeed's, Megatron's and fairscale's are all named like this."""
    return "checkpoint" in function.lower()
