"""The model and the batch that a command line asks for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from .cli_arguments import CAUSAL_LM, SEQ_CLS, UsageError

_AUTO_MODELS: dict[str, Any] = {
    CAUSAL_LM: AutoModelForCausalLM,
    SEQ_CLS: AutoModelForSequenceClassification,
}
_PEFT_TASKS = {CAUSAL_LM: TaskType.CAUSAL_LM, SEQ_CLS: TaskType.SEQ_CLS}
WEIGHTS = (".safetensors", ".bin")
IGNORED_LABEL = -100


def build_model(options: argparse.Namespace) -> tuple[nn.Module, PretrainedConfig, str]:
    """The model with its adapters, its configuration, and the task.

    Raises:
        UsageError: for a model that cannot be had or adapted as asked.
    """
    config = _config(options)
    task = options.task or default_task(config)
    limit = getattr(config, "max_position_embeddings", None)
    if limit and options.seq_len > limit:
        raise UsageError(f"--seq_len {options.seq_len}: the model takes at most {limit} tokens")
    if task == SEQ_CLS and config.pad_token_id is None:
        config.pad_token_id = 0  # heads of decoders look for the last token that is no padding
    torch.manual_seed(options.seed)
    model: Any = _base(options, config, task)
    try:
        model = model.to(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {options.device}: {error}") from error
    return (_adapted(model, options, task) if options.lora_r else model), config, task


def default_task(config: PretrainedConfig) -> str:
    """What an architecture's name says; else classification for models of masked words."""
    for name in config.architectures or ():
        if name.endswith(("ForCausalLM", "LMHeadModel")):
            return CAUSAL_LM
        if name.endswith("ForSequenceClassification"):
            return SEQ_CLS
    return SEQ_CLS if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES else CAUSAL_LM


def build_batch(
    options: argparse.Namespace, config: PretrainedConfig, task: str
) -> dict[str, Tensor]:
    """Inputs with labels: ``[batch_size, seq_len]`` int64 ids, mask and, for a language model,
    labels; ``[batch_size]`` labels of 0 and 1 for classification.

    Raises:
        UsageError: when the text file or the tokenizer cannot be read.
    """
    generator = torch.Generator().manual_seed(options.seed)
    size = (options.batch_size, options.seq_len)
    if options.text_file:
        inputs = _texts(options)
    else:
        ids = torch.randint(0, config.vocab_size, size, generator=generator)
        if config.pad_token_id is not None:  # nothing of the batch is padding
            ids[ids == config.pad_token_id] = (config.pad_token_id + 1) % config.vocab_size
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if task == CAUSAL_LM:
        padding = inputs["attention_mask"] == 0
        inputs["labels"] = inputs["input_ids"].masked_fill(padding, IGNORED_LABEL)
    else:
        inputs["labels"] = torch.randint(0, 2, (options.batch_size,), generator=generator)
    return inputs


def _config(options: argparse.Namespace) -> PretrainedConfig:
    name, overrides = options.model, _overrides(options.config_overrides)
    config: Any
    is_type = options.from_config and name in CONFIG_MAPPING and not Path(name).is_dir()
    try:
        if is_type:
            known, unused = CONFIG_MAPPING[name](), {}
            unused = {key: value for key, value in overrides.items() if not hasattr(known, key)}
            config = AutoConfig.for_model(name, **overrides)
        else:
            config, unused = AutoConfig.from_pretrained(
                name, **overrides, return_unused_kwargs=True
            )
    except OSError as error:
        raise UsageError(
            f"{name!r} is no folder with a config.json, nor a model that the Hub gives "
            f"({_first_line(error)}). With --from_config it may also be a model type, such as "
            "roberta, gpt2 or llama"
        ) from error
    except Exception as error:  # transformers checks fields with exceptions of its own
        raise UsageError(
            f"the configuration of {name!r}: {' '.join(str(error).split())}"
        ) from error
    if unused:
        raise UsageError(
            f"--config_overrides: a configuration of type {config.model_type!r} has no "
            f"{', '.join(sorted(unused))}"
        )
    return config


def _overrides(pairs: list[str]) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise UsageError(f"--config_overrides {pair!r}: use KEY=VALUE")
        found[key] = yaml.safe_load(value)
    return found


def _base(options: argparse.Namespace, config: PretrainedConfig, task: str) -> PreTrainedModel:
    auto, dtype = _AUTO_MODELS[task], getattr(torch, options.dtype)
    folder = Path(options.model)
    try:
        if options.from_config:
            return auto.from_config(config, dtype=dtype)
        if folder.is_dir() and not any(f.suffix in WEIGHTS for f in folder.iterdir()):
            raise UsageError(f"{folder} holds no weights; --from_config takes random ones")
        return auto.from_pretrained(options.model, config=config, dtype=dtype)
    except OSError as error:
        raise UsageError(f"the weights of {options.model!r}: {_first_line(error)}") from error
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"--task {task}: there is no such model of type {config.model_type!r} "
            f"({_first_line(error)[:200]})"
        ) from error
    except TypeError as error:
        if not options.config_overrides:
            raise
        raise UsageError(
            f"--config_overrides {' '.join(options.config_overrides)}: no model can be made of it "
            f"({_first_line(error)[:200]})"
        ) from error


def _adapted(model: PreTrainedModel, options: argparse.Namespace, task: str) -> nn.Module:
    try:
        lora = LoraConfig(
            task_type=_PEFT_TASKS[task],
            r=options.lora_r,
            lora_alpha=options.lora_alpha,
            lora_dropout=options.lora_dropout,
            target_modules=options.target_modules,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        )
        return get_peft_model(model, lora)
    except ValueError as error:
        linear = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, (nn.Linear, Conv1D))
        }
        raise UsageError(
            f"LoRA: {_first_line(error)} Give --target_modules, of {', '.join(sorted(linear))}; "
            "--lora_r 0 trains all weights"
        ) from error


def _texts(options: argparse.Namespace) -> dict[str, Tensor]:
    try:
        text = Path(options.text_file).read_text(encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        raise UsageError(f"--text_file {options.text_file}: {_first_line(error)}") from error
    lines = [line for line in text.splitlines() if line.strip()][: options.batch_size]
    if len(lines) < options.batch_size:
        raise UsageError(
            f"--text_file {options.text_file}: {len(lines)} lines with text, and --batch_size "
            f"asks for {options.batch_size}"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    encoded = tokenizer(
        lines,
        truncation=True,
        padding="max_length",
        max_length=options.seq_len,
        return_tensors="pt",
    )
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
