"""Mixed precision."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from cases_trainer import trainer
from harness import Loop, Training, case
from tiny import batch, build

AREA = "Mixed precision"
BF16, FP16 = torch.bfloat16, torch.float16


def autocast(name, dtype) -> Loop:
    model, inputs = build(name), batch(name)

    def step() -> None:
        with torch.autocast("cpu", dtype):
            loss = model(**inputs).loss
        loss.backward()

    return Loop(model, step)


def low_weights(name, dtype) -> Loop:
    model, inputs = build(name).to(dtype), batch(name)
    return Loop(model, lambda: model(**inputs).loss.backward())


def adapters_in_fp32(name) -> Loop:
    """A base of bf16, and what PEFT makes of adapters on it (``autocast_adapter_dtype``)."""
    torch.set_default_dtype(BF16)
    try:
        model = build(name)
    finally:
        torch.set_default_dtype(torch.float32)
    inputs = batch(name)
    dtypes = {p.requires_grad: p.dtype for p in model.base_model.model.parameters()}
    assert dtypes == {False: BF16, True: torch.float32}, dtypes

    def step() -> None:
        with torch.autocast("cpu", BF16):
            loss = model(**inputs).loss
        loss.backward()

    return Loop(model, step)


for _name in ("roberta", "gpt2", "llama", "t5"):
    case(AREA, f"bf16 autocast, {_name}")(partial(autocast, _name, BF16))
    case(AREA, f"fp16 autocast, {_name}")(partial(autocast, _name, FP16))
    case(AREA, f"bf16 weights, {_name}")(partial(low_weights, _name, BF16))
    case(AREA, f"fp16 weights, {_name}")(partial(low_weights, _name, FP16))


@case(AREA, "fp32 adapters on a bf16 base")
def fp32_adapters() -> Loop:
    return adapters_in_fp32("llama")


@case(AREA, "GradScaler that skips a step")
def grad_scaler() -> Loop:
    model, inputs = build("roberta"), batch("roberta")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    number = itertools.count()

    def step() -> None:
        with torch.autocast("cpu", FP16):
            loss = model(**inputs).loss
        overflow = torch.inf if next(number) == 1 else 1.0
        scaler.scale(loss * overflow).backward()
        scaler.unscale_(optimizer)

    def optimize() -> None:
        scaler.step(optimizer)
        scaler.update()

    return Loop(model, step, optimize)


@case(AREA, "Trainer, bf16=True")
def trainer_bf16() -> Training:
    return trainer("gpt2", bf16=True)
