"""Mixed precision."""

from __future__ import annotations

import itertools
import tempfile
from functools import partial

import torch
from cases_trainer import trainer
from harness import Loop, Training, case
from peft import prepare_model_for_kbit_training
from tiny import batch, build, lora
from torch import nn
from torch.ao.quantization import QConfig, get_default_qat_qconfig, prepare_qat
from transformers import BitsAndBytesConfig, LlamaForCausalLM

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
    # Gradients of 1e-5 would be a few of fp16's smallest numbers, and what they lose there is none
    # of our loss.
    scale = 64 if dtype is FP16 else 1
    return Loop(model, lambda: (scale * model(**inputs).loss).backward())


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


@case(
    AREA,
    "GradScaler that skips a step",
    lacks={"exception": "which step overflows depends on those before"},
)
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


def quantized(**options) -> Loop:
    """A frozen base of few bits a weight, as for QLoRA."""
    with tempfile.TemporaryDirectory() as folder:
        build("llama").unload().save_pretrained(folder)
        few = BitsAndBytesConfig(**options)
        base = LlamaForCausalLM.from_pretrained(folder, quantization_config=few, device_map="cpu")
    torch.manual_seed(0)
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    model, inputs = lora(base, ["q_proj", "v_proj"]).train(), batch("llama")
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    assert {torch.uint8, torch.int8} & {weight.dtype for weight in frozen.values()}

    def step() -> None:
        model(**inputs).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad or torch.equal(parameter, frozen[name]), name

    return Loop(model, step)


@case(AREA, "4-bit weights, bitsandbytes", needs=("bitsandbytes",))
def four_bits() -> Loop:
    return quantized(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )


@case(AREA, "8-bit weights, bitsandbytes", needs=("bitsandbytes",))
def eight_bits() -> Loop:
    return quantized(load_in_8bit=True)


@case(AREA, "Trainer, fp16=True")
def trainer_fp16() -> Training:
    return trainer("roberta", fp16=True)


class Quantized(nn.Module):
    """Linear layers prepared for training that knows of their quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 16)
        )
        whole, by_channel = map(get_default_qat_qconfig, ("qnnpack", "fbgemm"))
        self.qconfig = QConfig(whole.activation, by_channel.weight)
        prepare_qat(self.train(), inplace=True)

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(inputs_embeds), labels)}


@case(AREA, "quantization-aware training, torch.ao")
def quantization_aware() -> Loop:
    model = Quantized()
    inputs = {"inputs_embeds": torch.randn(512, 64), "labels": torch.randint(0, 16, (512,))}
    return Loop(model, lambda: model(**inputs)["loss"].backward())
