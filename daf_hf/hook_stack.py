"""The thread's stack of saved-tensors hooks, entered and left without touching others' entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Hooks = tuple[Callable[..., Any], Callable[..., Any]]

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]

if not hasattr(_autograd.SavedTensor, "data"):  # what hooks packed: calibrations would see nothing
    raise ImportError(f"daf_hf needs torch 2.13 or later; this is torch {torch.__version__}")


def push_hooks(hooks: Hooks) -> None:
    """Put ``hooks`` on top of this thread's stack.

    Raises:
        RuntimeError: where torch forbids saved-tensors hooks (inside torch.func transforms).
    """
    _autograd._push_saved_tensors_default_hooks(*hooks)


def top_hooks() -> Hooks | None:
    """The hooks that now get what is saved in this thread."""
    return _autograd._top_saved_tensors_default_hooks(False)


def pop_hooks(hooks: Hooks) -> None:
    """Take ``hooks`` off the stack, wherever they are; others' entries keep their order."""
    above: list[Hooks] = []
    while (top := top_hooks()) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        if top[0] == hooks[0]:
            break
        above.append(top)
    for other in reversed(above):
        push_hooks(other)
