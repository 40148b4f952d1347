"""Compiled models.

Graphs are compiled by ``aot_eager``: what autograd saves is what inductor's graphs save, and it is
there in a fraction of the time. Inductor's own are in ``tests/test_session.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import Loop, case
from tiny import needs_compiler
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 64
AOT = {"backend": "aot_eager"}


class Layer(nn.Module):
    """A feed-forward layer, checkpointed or not."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self._checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self._checkpointed:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)

    def _inner(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tagger(nn.Module):
    """Two layers, and the loss of a class for each token."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(checkpointed) for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, inputs_embeds: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds)
        logits = self.head(inputs_embeds)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def batch(examples: int = 16, tokens: int = 16) -> dict[str, Tensor]:
    """Embeddings and classes."""
    embeddings = torch.randn(examples, tokens, WIDTH)
    return {"inputs_embeds": embeddings, "labels": torch.randint(0, 16, (examples, tokens))}


def compiled(
    compile_: Callable[[Tagger], Callable[..., dict[str, Tensor]]], checkpointed: bool = False
) -> Loop:
    """A loop over a model that ``compile_`` compiles, with nothing of earlier ones left."""
    needs_compiler(**AOT)
    torch._dynamo.reset()
    model, inputs = Tagger(checkpointed), batch()
    call = compile_(model)
    return Loop(model, lambda: call(**inputs)["loss"].backward())


@case("torch.compile", "torch.compile(model)")
def a_model() -> Loop:
    return compiled(lambda model: torch.compile(model, **AOT))


@case("torch.compile", "model.compile()")
def in_place() -> Loop:
    def compile_(model):
        model.compile(**AOT)
        return model

    return compiled(compile_)


@case("torch.compile", "each layer compiled")
def each_layer() -> Loop:
    def compile_(model):
        for layer in model.layers:
            layer.compile(**AOT)
        return model

    return compiled(compile_)


@case("torch.compile", "gradient checkpointing in a compiled model")
def checkpointed() -> Loop:
    return compiled(lambda model: torch.compile(model, **AOT), checkpointed=True)
