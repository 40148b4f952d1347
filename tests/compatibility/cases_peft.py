"""PEFT's methods, and what is trained without an adapter."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import pytest
import torch
from harness import Loop, case
from peft import LoraConfig, get_peft_model, initialize_lora_eva_weights
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from tiny import HIDDEN, VOCABULARY, ConvNet, batch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

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


def gpt2(tied: bool = False) -> nn.Module:
    """The bare model; its layers are Conv1D."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=HIDDEN,
            n_layer=2,
            n_head=4,
            n_positions=64,
            tie_word_embeddings=tied,
        )
    )


def opt() -> nn.Module:
    """The bare model; its linear layers have biases."""
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=2 * HIDDEN,
            max_position_embeddings=64,
            word_embed_proj_dim=HIDDEN,
            pad_token_id=0,
        )
    )


def mixtral() -> nn.Module:
    """The bare model: a mixture of experts, each weight of which is one parameter for all."""
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=2 * HIDDEN,
            max_position_embeddings=64,
            num_local_experts=4,
            pad_token_id=0,
        )
    )


def loop(model: nn.Module, **more: Any) -> Loop:
    """A subject: a plain loop over one batch."""
    inputs = {**batch("llama"), **more}
    model.train()
    return Loop(model, lambda: model(**inputs).loss.backward())


def method(
    config: str,
    build: Callable[[], nn.Module] = llama,
    inputs: dict[str, Any] | None = None,
    **options: Any,
) -> Loop:
    """A subject: the model with an adapter, given more inputs."""
    kind = getattr(peft, config, None)
    if kind is None:
        pytest.skip(f"this version of peft has no {config}")
    with warnings.catch_warnings():  # peft's own, of what it cannot merge or speed up
        warnings.filterwarnings("ignore", category=UserWarning, module=r"peft\.")
        model = get_peft_model(build(), kind(task_type="CAUSAL_LM", **options))
    return loop(model, **(inputs or {}))


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
    "LoRA, `orthogonal`": {"init_lora_weights": "orthogonal"},
    "LoRA, biases": {"build": opt, "lora_bias": True, "bias": "lora_only"},
    "LoRA, tied embeddings": {
        "build": partial(gpt2, tied=True),
        "target_modules": ["c_attn", "wte"],
        "fan_in_fan_out": True,
        "ensure_weight_tying": True,
    },
    "LoRA, a mixture's experts": {
        "build": mixtral,
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "BD-LoRA": {
        "use_bdlora": {
            "target_modules_bd_a": ["q_proj"],
            "target_modules_bd_b": ["v_proj"],
            "nblocks": 2,
        }
    },
    "KaSA": {"kasa_config": {}},
    "MiCA": {"init_lora_weights": "mica"},
    "VeLoRA": {"velora_config": {"num_groups": 8}},
}

NEEDS = {
    "aLoRA": ("peft>=0.18",),
    "LoRA, tied embeddings": ("peft>=0.18",),
    "LoRA, a mixture's experts": ("peft>=0.18", "transformers>=5"),
    "BD-LoRA": ("peft>=0.19",),
    "KaSA": ("peft>=0.21",),
    "MiCA": ("peft>=0.20",),
    "VeLoRA": ("peft>=0.20",),
}
TASKS = {"task_ids": torch.tensor([0, 1] * 4)}
"""Which task each example is of."""

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
    "BOFT, with dropout": (
        "BOFTConfig",
        {"boft_block_size": 4, "boft_dropout": 0.1, "target_modules": ATTENTION},
    ),
    "DeLoRA, with dropout": (
        "DeloraConfig",
        {"r": 4, "module_dropout": 0.1, "target_modules": ATTENTION},
    ),
    "DEFT, QR decomposition": (
        "DeftConfig",
        {"r": 4, "decomposition_method": "qr", "para": True, "target_modules": ATTENTION},
    ),
    "GLoRA, vectors": (
        "GloraConfig",
        {
            "config_A_B": "vector",
            "config_C": "vector",
            "config_D_E": "vector",
            "target_modules": ATTENTION,
        },
    ),
    "GraLoRA, hybrid": (
        "GraloraConfig",
        {"r": 4, "gralora_k": 2, "hybrid_r": 2, "target_modules": ATTENTION},
    ),
    "PEANuT, hidden layers": ("PeanutConfig", {"r": 4, "depth": 1, "target_modules": ATTENTION}),
    "RoAd, `road_4`": (
        "RoadConfig",
        {"variant": "road_4", "group_size": 16, "target_modules": ATTENTION},
    ),
    "ShadowPEFT": ("ShadowConfig", {"r": 4}),
    "Poly": (
        "PolyConfig",
        {"inputs": TASKS, "r": 4, "n_tasks": 2, "n_skills": 2, "target_modules": ATTENTION},
    ),
    "multitask prompt tuning": (
        "MultitaskPromptTuningConfig",
        {"inputs": TASKS, "num_virtual_tokens": 4, "num_tasks": 2},
    ),
    "CPT": (
        "CPTConfig",
        {
            "cpt_token_ids": [5, 6, 7, 8],
            "cpt_mask": [1, 1, 1, 1],
            "cpt_tokens_type_mask": [1, 2, 3, 4],
        },
    ),
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


CONVOLUTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA, convolutions": ("LoraConfig", {"r": 4, "lora_dropout": 0.1}),
    "DoRA, convolutions": ("LoraConfig", {"r": 4, "use_dora": True}),
    "LoHa, convolutions": ("LoHaConfig", {"r": 4, "use_effective_conv2d": True}),
    "LoKr, convolutions": ("LoKrConfig", {"r": 4, "use_effective_conv2d": True}),
    "OFT, convolutions": ("OFTConfig", {"r": 0, "oft_block_size": 8}),
    "IA3, convolutions": ("IA3Config", {"feedforward_modules": []}),
}


def convolutions(config: str, **options: Any) -> Loop:
    """A subject: a small residual network with an adapter."""
    kind = getattr(peft, config)
    model = get_peft_model(ConvNet(), kind(target_modules=["conv1", "conv2"], **options)).train()
    for module in model.modules():
        # A batch's own statistics undo any scale of a channel: DoRA's have no gradient but rest.
        if isinstance(module, nn.BatchNorm2d) and options.get("use_dora"):
            module.eval()
    inputs = batch("conv")
    return Loop(model, lambda: model(**inputs)["loss"].backward())


for _name, (_kind, _options) in CONVOLUTIONS.items():
    case(AREA, _name)(partial(convolutions, _kind, **_options))


def initialised(
    prepare: Callable[[nn.Module, LoraConfig], None] = lambda model, config: None, **options: Any
) -> Loop:
    """A subject: LoRA whose weights at the start are made of what is seen in ``prepare``."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=ATTENTION, **options)
    model = llama()
    with warnings.catch_warnings():  # of memory, and of hooks on layers whose input is the batch's
        warnings.filterwarnings("ignore", "lora with eva initialization|Full backward hook is")
        prepare(model, config)
        return loop(get_peft_model(model, config))


@case(AREA, "CorDA")
def corda() -> Loop:
    def prepare(model: nn.Module, config: LoraConfig) -> None:
        def run() -> None:
            for ids in batch("llama")["input_ids"]:  # it takes one example at a time
                model(input_ids=ids[None])

        preprocess_corda(model, config, run)

    options = CordaConfig(corda_method="kpm")
    return initialised(prepare, init_lora_weights="corda", corda_config=options)


@case(AREA, "EVA")
def eva() -> Loop:
    subject = initialised(init_lora_weights="eva", eva_config=peft.EvaConfig())
    initialize_lora_eva_weights(subject.model, [batch("llama")], show_progress_bar=False)
    return subject


@case(AREA, "LoRA-GA", needs=("peft>=0.19",))
def lora_ga() -> Loop:
    from peft.tuners.lora.loraga import preprocess_loraga

    def prepare(model: nn.Module, config: LoraConfig) -> None:
        preprocess_loraga(model, config, lambda: model(**batch("llama")).loss.backward())

    options = peft.LoraGAConfig()
    return initialised(prepare, init_lora_weights="lora_ga", lora_ga_config=options)


@case(AREA, "MonteCLoRA", needs=("peft>=0.20",))
def monteclora() -> Loop:
    from peft.tuners.lora.config import MontecloraConfig
    from peft.tuners.lora.monteclora import MontecloraSampler

    # A buffer of more samples than one is of no random state: other passes would use it up.
    options = MontecloraConfig(num_samples=4, sample_scaler=1e-2, buffer_size=1)
    subject = initialised(monteclora_config=options)
    model, inputs = subject.model, batch("llama")
    for module in model.modules():
        if isinstance(module, MontecloraSampler):
            module.sampler.index = 1  # nor is the first, drawn already

    def step() -> None:
        (model(**inputs).loss + model.base_model._get_monteclora_loss()).backward()

    return Loop(model, step)


@case(AREA, "AdaMSS, subspaces masked on the way", needs=("peft>=0.19",))
def adamss_masks() -> Loop:
    subject = method(
        "AdamssConfig",
        r=16,
        num_subspaces=4,
        use_asa=True,
        asa_target_subspaces=8,
        init_warmup=0,
        final_warmup=3,
        mask_interval=1,
        target_modules=ATTENTION,
    )
    model, steps = subject.model, count()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)

    def optimize() -> None:
        optimizer.step()
        model.base_model.update_and_allocate(next(steps))

    return Loop(model, subject._step, optimize)


def sparse(config: str, **options: Any) -> Loop:
    """A subject: an adapter with sparse weights."""
    subject = method(config, target_modules=ATTENTION, **options)

    def step() -> None:
        with warnings.catch_warnings():
            # Of modules that are never called, and whose hooks are therefore not.
            warnings.filterwarnings("ignore", ".*backward/forward .pre. hooks set which will be")
            with torch.sparse.check_sparse_tensor_invariants(False):  # or torch warns, once
                subject._step()

    return Loop(subject.model, step)


SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "FRoD": ("FrodConfig", {"progressbar": False}),
    "SHiRA": ("ShiraConfig", {"r": 4, "random_seed": 0}),
    "Super": ("SupertuningConfig", {"sparsity": 0.9}),
    "Supra": ("SupertuningConfig", {"sparsity": 0.9, "r": 4}),
}
for _name, (_kind, _options) in SPARSE.items():
    case(AREA, _name)(partial(sparse, _kind, **_options))


def xlora(**options: Any) -> Loop:
    """A subject: a mixture of two adapters from files, and the classifier that weighs them."""
    with TemporaryDirectory() as folder:
        paths = {name: str(Path(folder) / name) for name in ("0", "1")}
        for path in paths.values():
            initialised(init_lora_weights=False).model.save_pretrained(path)
        config = peft.XLoraConfig(
            task_type="CAUSAL_LM",
            hidden_size=HIDDEN,
            adapters=paths,
            xlora_depth=2,
            xlora_size=32,
            **options,
        )
        model = llama()
        model.config.use_cache = False
        return loop(get_peft_model(model, config))


case(AREA, "X-LoRA")(partial(xlora, layerwise_scalings=True))
case(AREA, "X-LoRA, adapters trained too")(partial(xlora, use_trainable_adapters=True))


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
