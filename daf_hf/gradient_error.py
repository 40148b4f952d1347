"""How far gradients are off: relative to their norms, kind by kind of parameters."""

from __future__ import annotations

import re

from torch import Tensor, nn

MODULES_TO_SAVE = ".modules_to_save."
"""In the name of a parameter that PEFT trains in full beside the adapters."""


class GradientError:
    """Squared relative changes of the gradients of all that is trained.

    Parameters of one kind (the same in every layer) count together, relative to their own norm,
    and kinds by their number of elements: Adam's steps do not follow the gradient's scale. A head's
    or the value projections' gradient is often many times that of the query projections, and would
    hide whatever befalls those. What PEFT trains in full beside the adapters is averaged by itself.

    Args:
        model: all of its parameters that require a gradient are taken to be trained.

    Attributes:
        parameters: those, in the model's order.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.parameters = [parameter for _, parameter in named]
        self._kinds = _kinds([name for name, _ in named])

    def of(self, change: list[Tensor | None], reference: list[Tensor | None]) -> float:
        """The error of gradients that have changed from a reference.

        Args:
            change: one tensor a parameter, in its shape; None where there is no gradient.
            reference: the same, of the gradients.
        """
        total = 0.0
        for kinds in self._kinds:
            error = elements = 0.0
            for kind in kinds:
                norm = squared_norm([reference[index] for index in kind])
                if norm > 0:
                    count = sum(self.parameters[index].numel() for index in kind)
                    error += count * squared_norm([change[index] for index in kind]) / norm
                    elements += count
            total += error / elements if elements else 0.0
        return total


def squared_norm(tensors: list[Tensor | None]) -> float:
    """Of all tensors together."""
    return sum(float(t.float().square().sum()) for t in tensors if t is not None)


def kind_of(name: str) -> str:
    """What is the same in every layer has the same."""
    return re.sub(r"\.\d+(?=\.)", "", name)


def _kinds(names: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Indices of the parameters of each kind: of adapters (or of all), and of those beside them."""
    kinds: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})
    for index, name in enumerate(names):
        kind = kind_of(name)
        kinds[MODULES_TO_SAVE in name].setdefault(kind, []).append(index)
    return list(kinds[0].values()), list(kinds[1].values())
