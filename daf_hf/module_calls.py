"""Modules' calls in progress, as hooks of the modules tell them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(slots=True)
class Call:
    """A module's call in progress."""

    module: nn.Module
    name: str
    seen: dict[tuple[Any, ...], int] = field(default_factory=dict)


class _Hook:
    """A hook of one model: its copies, and pickles of it, get one that does nothing."""

    def __init__(
        self, calls: Callable[[], list[Call]], name: str, on_call: Callable[[], None]
    ) -> None:
        self._calls = calls
        self._name = name
        self._on_call = on_call

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


class _Enter(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._calls().append(Call(module, self._name))
            self._on_call()


class _Leave(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            stack = self._calls()
            while stack and stack.pop().module is not module:
                pass


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    pass


class Followed:
    """The hooks of a module, taken off and put on again as the same.

    What is compiled is guarded by the ids of its modules' hooks: with new ones it would be compiled
    again whenever a loop enters its ``with`` block.

    Args:
        module: whose calls are followed.
        name: qualified name of the module.
        calls: gives the calls that are in progress in this thread, the innermost last.
        on_call: called whenever the module is.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        calls: Callable[[], list[Call]],
        on_call: Callable[[], None],
    ) -> None:
        self._hooks = enter, leave = _Enter(calls, name, on_call), _Leave(calls, name, on_call)
        self._handles = (
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        )

    def again(self, module: nn.Module) -> None:
        (enter, leave), (before, after) = self._hooks, self._handles
        module._forward_pre_hooks[before.id] = enter
        module._forward_hooks[after.id] = leave
        module._forward_hooks_always_called[after.id] = True

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
