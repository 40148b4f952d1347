"""Parameters that are all zero, moved off it for a measurement.

While LoRA's B is zero, A has no gradient and every input of A looks free. Adam's first steps move
B by about the learning rate times the gradient's sign; so does this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .model_state import unversioned

NUDGE = 0.01
"""How far parameters that are all zero are moved for the measurement (LoRA's B at the start)."""


def all_zero(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those of which every element is zero."""
    return [p for p in parameters if not p.is_meta and not bool(p.any())]


def signed_steps(
    parameters: list[nn.Parameter], gradients: list[Tensor | None]
) -> tuple[dict[nn.Parameter, Tensor], bool]:
    """For parameters that are all zero, one signed gradient step.

    Args:
        parameters: all zero.
        gradients: one a parameter, in its shape; None where the loss does not depend on it.

    Returns:
        The values after the step of those whose gradient has a direction; whether all that the
        loss depends on have one.
    """
    found = {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}
    moves = {
        parameter: -NUDGE * gradient.sign()
        for parameter, gradient in found.items()
        if bool(gradient.any()) and bool(gradient.isfinite().all())
    }
    return moves, len(moves) == len(found)


@contextmanager
def moved(moves: dict[nn.Parameter, Tensor]) -> Iterator[None]:
    """Inside, the parameters have these values; afterwards, bit for bit their own."""
    before = [parameter.detach().clone() for parameter in moves]
    try:
        with torch.no_grad(), unversioned(list(moves)):
            for parameter, value in moves.items():
                parameter.copy_(value)
        yield
    finally:
        with torch.no_grad(), unversioned(list(moves)):
            for parameter, value in zip(moves, before, strict=True):
                parameter.copy_(value)
        # Autocast may have cached low-precision copies of the moved parameters.
        torch.clear_autocast_cache()
