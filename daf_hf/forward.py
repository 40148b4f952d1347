"""A model's forward, wrapped so that somebody sees its passes, and unwrapped again."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from .batches import Inputs
from .compilers import as_compiled_here


class Watcher(Protocol):
    """Who sees forward passes.

    Attributes:
        installed: passes are to be seen now.
    """

    installed: bool

    def begin_pass(self, original: Callable[..., Any], inputs: Inputs) -> Any:
        """Before a pass: the model's own forward and its inputs; returns what stands for it."""
        ...

    def end_pass(self, current: Any, completed: bool) -> None:
        """After it, also when it raised; given what :meth:`begin_pass` has returned."""
        ...


def wrap_forward(model: nn.Module, watcher: Watcher) -> Callable[[], None]:
    """Let somebody see the model's forward passes, as long as gradients are enabled in them.

    The model does not keep its watcher alive. A copy of the model runs its own forward, unseen.

    Returns:
        What undoes it.
    """
    own, original = model.__dict__.get("forward"), model.forward
    reference, watching = weakref.ref(model), weakref.ref(watcher)
    method = original.__func__ if getattr(original, "__self__", None) is model else None
    # A compiler traces the model, never us; these two also undo what it does around us.
    begin: Any = torch.compiler.disable(type(watcher).begin_pass)
    end: Any = torch.compiler.disable(type(watcher).end_pass)

    # A method, for a copy of the model to get one of its own.
    @functools.wraps(original)
    @torch.compiler.disable(recursive=False)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is not reference():
            return method.__get__(module)(*args, **kwargs) if method else original(*args, **kwargs)
        this = watching()
        if this is None or not this.installed or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        current = begin(this, as_compiled_here(original), (args, kwargs))
        completed = False
        try:
            outputs = original(*args, **kwargs)
            completed = True
        finally:
            end(this, current, completed)
        return outputs

    module = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(original)
    wrapper: Any = forward
    wrapper.__signature__ = signature.replace(parameters=[module, *signature.parameters.values()])
    wrapped = types.MethodType(forward, model)

    def restore() -> None:
        # Somebody may have wrapped the wrapper since: it then stays, and passes through.
        if model.__dict__.get("forward") is wrapped:
            if own is None:
                del model.forward
            else:
                model.forward = own

    model.forward = wrapped
    return restore
