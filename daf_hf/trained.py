"""What of a model is trained."""

from __future__ import annotations

from torch import nn


def require_trained(model: nn.Module) -> None:
    """See that there is something to train.

    Raises:
        ValueError: when no parameter of the model requires a gradient.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "the model has no parameter with requires_grad=True: nothing is saved for "
            "backward, so there is nothing to compress. Add an adapter (peft.get_peft_model) "
            "or unfreeze parameters first."
        )


def touch_weights(model: nn.Module) -> None:
    """Read a word of every page of the weights.

    Weights that are mapped from a file become resident with their first use, which is not to be
    taken for memory that training took.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.is_contiguous():
            parameter.detach().view(-1)[:: 4096 // parameter.element_size()].sum()
