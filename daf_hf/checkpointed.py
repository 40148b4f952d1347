"""Checkpointed regions: what is saved for them, and which of a graph's nodes run them again.

A region's inputs are saved before it runs: where it is reentrant by an autograd function of the
checkpoint's own, else (``torch.utils.checkpoint`` with ``use_reentrant=False``) by the checkpoint
itself, for no node of the graph. What the region saves inside is not seen in the forward pass.
"""

from __future__ import annotations

import threading
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


class _Repeatable:
    """Has selective checkpoints select nothing in the threads that are inside.

    Torch's function is replaced while any thread is, whichever leaves last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._inside = 0
        self._original: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, selective checkpoints select nothing: what they kept they give back only once.

        A graph is otherwise the same, and so are its gradients.
        """
        with self._lock:
            if not self._inside:
                self._original = _checkpoint._checkpoint_without_reentrant_generator
                _checkpoint._checkpoint_without_reentrant_generator = self._generator
            self._inside += 1
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    _checkpoint._checkpoint_without_reentrant_generator = self._original

    def _generator(
        self, fn: Any, preserve: bool, context_fn: Callable[[], Any], *rest: Any, **options: Any
    ) -> Any:
        if not getattr(self._local, "depth", 0):
            return self._original(fn, preserve, context_fn, *rest, **options)
        contexts = context_fn()
        selects = isinstance(contexts[1], _checkpoint._CachedTorchDispatchMode)
        chosen = _checkpoint.noop_context_fn if selects else lambda: contexts
        return self._original(fn, preserve, chosen, *rest, **options)


repeatable = _Repeatable()


def _is_name_of_one(function: str) -> bool:
    """Torch's, DeepSpeed's, Megatron's and fairscale's are all named like this."""
    return "checkpoint" in function.lower()
