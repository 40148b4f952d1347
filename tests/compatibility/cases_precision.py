"""Mixed precision."""

from __future__ import annotations

import torch
from harness import Loop, case
from tiny import batch, build


@case("Mixed precision", "bf16 autocast")
def bf16_autocast() -> Loop:
    model, inputs = build("roberta"), batch("roberta")

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()

    return Loop(model, step)


@case("Mixed precision", "bf16 weights")
def bf16_weights() -> Loop:
    model, inputs = build("llama").to(torch.bfloat16), batch("llama")
    return Loop(model, lambda: model(**inputs).loss.backward())
