"""Compilers (``torch.compile``): what they are to see of a model, and what not of us."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo import trace_rules

_TRACED = ("module_calls",)
"""Modules of ours whose functions are traced as a part of the model: hooks of its modules."""


@cache
def keep_out() -> None:
    """Let no compiler trace what we do while compiled code runs: packing, unpacking, ends."""
    package = __name__.rpartition(".")[0]
    path = __import__(package).__path__
    for module in pkgutil.iter_modules(path):
        if module.name not in _TRACED and module.name != "__main__":
            trace_rules.add(f"{package}.{module.name}")


def as_compiled_here(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, compiled wherever it is called if a compiler would take it up here.

    ``torch.compile(model)`` compiles the frames that are called inside; what we do meanwhile is
    out of its sight, and a calibration is to see the tensors that the compiled model saves.
    """
    compiler = set_eval_frame(None)  # there is no other way to ask for it
    set_eval_frame(compiler)
    if not compiler:
        return original

    def compiled(*args: Any, **kwargs: Any) -> Any:
        outside = set_eval_frame(compiler)
        try:
            return original(*args, **kwargs)
        finally:
            set_eval_frame(outside)

    return compiled
