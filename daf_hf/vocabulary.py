"""Heads of language models whose logits are reduced chunk by chunk (`chunked_loss`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .chunked_loss import RowFunction
from .lazy_logits import LazyLogits

logger = logging.getLogger("daf_hf")

LEAST_VOCABULARY = 8192
"""Below it, logits are no larger than what a few layers save, and ``"auto"`` leaves them alone."""


class LazyHead(nn.Linear):
    """A language model's head that gives `LazyLogits` where a gradient will be wanted.

    A class, and not a wrapped method, so that copies of a model work as they would: they, and what
    is pickled, get a plain head.
    """

    def forward(self, input: Tensor) -> Tensor:
        trained = input.requires_grad or self.weight.requires_grad
        # Somebody may have kept this method, and call it after the compression has ended.
        lazy = type(self) is LazyHead and not torch.compiler.is_compiling()
        if not (lazy and trained and torch.is_grad_enabled()):
            return nn.Linear.forward(self, input)
        return LazyLogits(input, self.weight, self.bias, RowFunction.here(input))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (nn.Linear,), self.__dict__.copy()

    def _get_name(self) -> str:
        return "Linear"


def chunk_losses(model: nn.Module, choice: bool | str) -> Callable[[], None]:
    """Let the language models in ``model`` compute their losses by chunks.

    A model that cannot be handled is left alone, which is logged: as a warning with ``True``.

    Args:
        model: the root module.
        choice: ``True``; ``False``; ``"auto"``, vocabularies of `LEAST_VOCABULARY` tokens or more.

    Returns:
        What undoes it.
    """
    heads: list[Any] = []
    refused: list[Any] = []
    for name, module in model.named_modules() if choice is not False else ():
        head = _output_embeddings(module)
        if head is None or any(head is other for other in (*heads, *refused)):
            continue
        reason = _refusal(module, head)
        if reason is not None:
            refused.append(head)  # also where a part of this model has it
            level = logging.WARNING if choice is True else logging.INFO
            what = name or type(module).__name__
            logger.log(level, "daf_hf: chunked_loss leaves %s alone: %s", what, reason)
        elif choice is True or head.out_features >= LEAST_VOCABULARY:
            head.__class__ = LazyHead
            heads.append(head)

    def restore() -> None:
        for head in heads:
            if head.__class__ is LazyHead:
                head.__class__ = nn.Linear

    return restore


def _output_embeddings(module: nn.Module) -> Any:
    """The head of a language model of transformers, where this is one."""
    if not (hasattr(module, "config") and hasattr(module, "base_model_prefix")):
        return None
    getter = getattr(module, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def _refusal(module: Any, head: Any) -> str | None:
    """Why it cannot be handled."""
    if getattr(module.config, "is_encoder_decoder", False):
        return "it has an encoder and a decoder"
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        return f"its head is a {type(head).__name__}, not a plain torch.nn.Linear"
    if "forward" in head.__dict__:
        return "its head's forward is wrapped by somebody else"
    return None
