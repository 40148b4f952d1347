"""PEFT's methods, and what is trained without an adapter."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
from harness import Loop, case
from peft import get_peft_model
from tiny import HIDDEN, VOCABULARY, batch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

AREA = "PEFT"
ATTENTION = ["q_proj", "v_proj"]


def llama() -> nn.Module:
    """The bare model."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * HIDDEN,
            max_position_embeddings=64,
            attention_dropout=0.1,
            pad_token_id=0,
        )
    )


def gpt2() -> nn.Module:
    """The bare model, with untied embeddings; its layers are Conv1D."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=HIDDEN,
            n_layer=2,
            n_head=4,
            n_positions=64,
            tie_word_embeddings=False,
        )
    )


def loop(model: nn.Module, **more: Any) -> Loop:
    """A subject: a plain loop over one batch."""
    inputs = {**batch("llama"), **more}
    model.train()
    return Loop(model, lambda: model(**inputs).loss.backward())


def method(config: str, build: Callable[[], nn.Module] = llama, **options: Any) -> Loop:
    """A subject: the model with an adapter."""
    kind = getattr(peft, config, None)
    if kind is None:
        pytest.skip(f"this version of peft has no {config}")
    with warnings.catch_warnings():  # peft's own, of what it cannot merge or speed up
        warnings.filterwarnings("ignore", category=UserWarning, module=r"peft\.")
        return loop(get_peft_model(build(), kind(task_type="CAUSAL_LM", **options)))


LORA: dict[str, dict[str, Any]] = {
    "LoRA, all linear layers": {"target_modules": "all-linear"},
    "rsLoRA, ranks by layer": {"use_rslora": True, "rank_pattern": {"layers.0.*": 2}},
    "DoRA, with dropout": {"use_dora": True, "lora_dropout": 0.1},
    "DoRA, embeddings and head": {"use_dora": True, "target_modules": ["embed_tokens", "lm_head"]},
    "PiSSA": {"init_lora_weights": "pissa"},
    "OLoRA": {"init_lora_weights": "olora"},
    "LoRA, layers replicated": {"layer_replication": [(0, 2), (1, 2)]},
    "LoRA, single tokens too": {"trainable_token_indices": [5, 6, 7]},
    "LoRA, `modules_to_save`": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "aLoRA": {"alora_invocation_tokens": [5]},
}

NEEDS = {"aLoRA": ("peft>=0.18",)}

for _name, _options in LORA.items():
    _options = {"r": 4, "target_modules": ATTENTION, **_options}
    case(AREA, _name, needs=NEEDS.get(_name, ()))(partial(method, "LoraConfig", **_options))

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "VeRA": ("VeraConfig", {"r": 8, "target_modules": ["up_proj"]}),
    "IA3": (
        "IA3Config",
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "LoHa": ("LoHaConfig", {"r": 4, "target_modules": ATTENTION}),
    "LoKr": ("LoKrConfig", {"r": 4, "target_modules": ATTENTION}),
    "AdaLoRA": ("AdaLoraConfig", {"total_step": 200, "target_modules": ATTENTION}),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 8, "target_modules": ATTENTION}),
    "HRA": ("HRAConfig", {"r": 4, "target_modules": ATTENTION}),
    "MiSS": ("MissConfig", {"r": 4, "target_modules": ATTENTION}),
    "RandLoRA": ("RandLoraConfig", {"r": 4, "target_modules": ATTENTION}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 50, "target_modules": ATTENTION}),
    "VB-LoRA": (
        "VBLoRAConfig",
        {"r": 4, "num_vectors": 16, "vector_length": 16, "target_modules": ATTENTION},
    ),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4, "target_modules": ATTENTION}),
    "C3A": ("C3AConfig", {"block_size": 16, "target_modules": ATTENTION}),
    "RoAd": ("RoadConfig", {"group_size": 16, "target_modules": ATTENTION}),
    "WaveFT": ("WaveFTConfig", {"n_frequency": 50, "target_modules": ATTENTION}),
    "DeLoRA": ("DeloraConfig", {"r": 4, "target_modules": ATTENTION}),
    "GraLoRA": ("GraloraConfig", {"r": 4, "gralora_k": 2, "target_modules": ATTENTION}),
    "HiRA": ("HiraConfig", {"r": 4, "target_modules": ATTENTION}),
    "AdaMSS": ("AdamssConfig", {"target_modules": ATTENTION}),
    "BEFT": ("BeftConfig", {"target_modules": ATTENTION}),
    "Lily": ("LilyConfig", {"r": 4, "target_modules": ATTENTION}),
    "PVeRA": ("PveraConfig", {"r": 8, "target_modules": ["up_proj"]}),
    "GLoRA": ("GloraConfig", {"r": 4, "target_modules": ATTENTION}),
    "UniLoRA": ("UniLoraConfig", {"target_modules": ATTENTION}),
    "TinyLoRA": ("TinyLoraConfig", {"target_modules": ATTENTION}),
    "PSOFT": ("PsoftConfig", {"r": 4, "target_modules": ATTENTION}),
    "PEANuT": ("PeanutConfig", {"r": 4, "target_modules": ATTENTION}),
    "DEFT": ("DeftConfig", {"r": 4, "target_modules": ATTENTION}),
    "Cartridge": ("CartridgeConfig", {"num_virtual_tokens": 4}),
    "OSF": ("OSFConfig", {"target_modules": ATTENTION}),
    "trainable tokens": (
        "TrainableTokensConfig",
        {"token_indices": [5, 6, 7], "target_modules": ["embed_tokens"]},
    ),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "P-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 32}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "adaption prompt": ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 2}),
}
for _name, (_kind, _options) in OTHERS.items():
    case(AREA, _name)(partial(method, _kind, **_options))


@case(AREA, "DoRA, Conv1D")
def dora_conv1d() -> Loop:
    targets = ["c_attn", "c_fc"]
    return method(
        "LoraConfig", gpt2, r=4, use_dora=True, fan_in_fan_out=True, target_modules=targets
    )


@case(AREA, "LN tuning")
def norms() -> Loop:
    with warnings.catch_warnings():  # peft says so of all that it does not know
        warnings.filterwarnings("ignore", "Unsupported layer type")
        return method("LNTuningConfig", gpt2, target_modules=["ln_1", "ln_2"])


@case(AREA, "full fine-tuning")
def full() -> Loop:
    return loop(llama())


@case(AREA, "biases alone")
def biases() -> Loop:
    model = gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith("bias")
    return loop(model)


@case(AREA, "last layer and head")
def last() -> Loop:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = bool(re.match(r"model.layers.1|lm_head", name))
    return loop(model)
