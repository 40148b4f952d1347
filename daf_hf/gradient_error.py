"""How far gradients are off: relative to their norms, kind by kind of parameters."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

ROUNDING = 16
"""Epsilons of its module's largest gradient that a gradient may have from rounding alone."""

MODULES_TO_SAVE = ".modules_to_save."
"""In the name of a parameter that PEFT trains in full beside the adapters."""


class GradientError:
    """Squared relative changes of the gradients of all that is trained.

    Parameters of one kind (the same in every layer) count together, relative to their own norm,
    and kinds by their number of elements: Adam's steps do not follow the gradient's scale. A head's
    or the value projections' gradient is often many times that of the query projections, and would
    hide whatever befalls those. What PEFT trains in full beside the adapters is averaged by itself.

    A gradient that is nothing but rounding does not count: that of a key's bias, which softmax does
    not see, is zero but for rounding, and any error of it as large as itself. What a parameter's
    gradient is off by is relative to no less than some epsilons of its module's largest.

    Args:
        model: all of its parameters that require a gradient are taken to be trained.

    Attributes:
        parameters: those, in the model's order.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.parameters = [parameter for _, parameter in named]
        self._modules = _modules([name for name, _ in named])
        self._beside = [MODULES_TO_SAVE in name for name, _ in named]

    def of(self, change: list[Tensor | None], reference: list[Tensor | None]) -> float:
        """The error of gradients that have changed from a reference.

        Args:
            change: one tensor a parameter, in its shape; None where there is no gradient.
            reference: the same, of the gradients.
        """
        error, elements = [0.0, 0.0], [0.0, 0.0]
        for kinds in self._modules:
            norms = [squared_norm([reference[index] for index in kind]) for kind in kinds]
            for kind, norm in zip(kinds, norms, strict=True):
                if norm > 0:
                    first = self.parameters[kind[0]]
                    rounding = (ROUNDING * torch.finfo(first.dtype).eps) ** 2 * max(norms)
                    count = sum(self.parameters[index].numel() for index in kind)
                    changed = squared_norm([change[index] for index in kind])
                    beside = self._beside[kind[0]]
                    error[beside] += count * changed / max(norm, rounding)
                    elements[beside] += count
        return sum(e / n for e, n in zip(error, elements, strict=True) if n)


def squared_norm(tensors: list[Tensor | None]) -> float:
    """Of all tensors together."""
    return sum(float(t.float().square().sum()) for t in tensors if t is not None)


def kind_of(name: str) -> str:
    """What is the same in every layer has the same."""
    return re.sub(r"\.\d+(?=\.)", "", name)


def _modules(names: list[str]) -> list[list[list[int]]]:
    """Indices of parameters: of one kind together, in lists by module."""
    modules: dict[str, dict[str, list[int]]] = {}
    for index, name in enumerate(names):
        kind = kind_of(name)
        kinds = modules.setdefault(kind.rpartition(".")[0], {})
        kinds.setdefault(kind, []).append(index)
    return [list(kinds.values()) for kinds in modules.values()]
