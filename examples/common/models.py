"""Models for the examples: configuration, tokenizer, and LoRA, from a folder or the Hub."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.options import UsageError, require_least
from peft import LoraConfig, PeftMixedModel, PeftModel, TaskType, get_peft_model
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

# Attention projections for model types that PEFT has no default for.
_TARGET_MODULES = {
    "distilbert": ["q_lin", "v_lin"],
    "albert": ["query", "value"],
    "mpnet": ["q", "v"],
}

# Models whose position ids start after the padding token's id.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer")


class ModelError(ValueError):
    """A model that cannot be found or adapted as asked."""


@dataclass
class ModelArguments:
    """Which model to fine-tune."""

    model_name_or_path: str = field(metadata={"help": "A folder, or a name on the Hub."})
    tokenizer_name: str | None = field(
        default=None,
        metadata={"help": "Where the tokenizer is, if not with the model."},
    )
    from_config: bool = field(
        default=False,
        metadata={"help": "Start from random weights; the folder needs no weights."},
    )
    model_type: str | None = field(
        default=None,
        metadata={"help": "With --from_config: default configuration of this type (e.g. gpt2)."},
    )


@dataclass
class LoraArguments:
    """How to adapt the model."""

    lora_r: int = field(default=8, metadata={"help": "Rank of the LoRA matrices."})
    lora_alpha: int = field(default=16, metadata={"help": "LoRA updates are scaled by alpha / r."})
    lora_dropout: float = field(default=0.1, metadata={"help": "Dropout before LoRA's A."})
    target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "Modules to adapt; by default the query and value projections."},
    )
    modules_to_save: list[str] | None = field(
        default=None,
        metadata={"help": "Modules to train in full; by default a new head, where there is one."},
    )

    def __post_init__(self) -> None:
        require_least(self, lora_r=1, lora_alpha=1)
        if not 0 <= self.lora_dropout < 1:
            raise UsageError(f"--lora_dropout {self.lora_dropout:g}: use 0 or more, less than 1")


def load_config(args: ModelArguments, path: str, **options: Any) -> PretrainedConfig:
    """Load the configuration of ``path``, or create that of ``--model_type``, with ``options``."""
    if args.model_type:
        if not args.from_config:
            raise ModelError("--model_type is for --from_config only")
        return AutoConfig.for_model(args.model_type, **options)
    try:
        return AutoConfig.from_pretrained(path, **options)
    except OSError as error:
        message = str(error).partition("\n")[0]
        raise ModelError(f"--model_name_or_path {path}: no such model ({message})") from error


def load_tokenizer(path: str, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, of the kind that ``config`` calls for, and see that it can pad."""
    tokenizer = AutoTokenizer.from_pretrained(path, config=config)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    return tokenizer


def max_tokens(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many tokens a text may have for the model to take it."""
    limit = getattr(config, "max_position_embeddings", tokenizer.model_max_length)
    if config.model_type in _OFFSET_POSITIONS:
        limit -= config.pad_token_id + 1
    return min(limit, tokenizer.model_max_length)


def require_weights(path: str) -> None:
    """Raise `ModelError` for a folder without weights, which is for ``--from_config`` only."""
    if Path(path).is_dir() and not any(
        file.suffix in (".safetensors", ".bin") for file in Path(path).iterdir()
    ):
        raise ModelError(f"{path} holds no weights; use --from_config to start from random ones")


def lora_config(
    lora: LoraArguments,
    config: PretrainedConfig,
    task_type: TaskType,
    head_modules: list[str] | None = None,
) -> LoraConfig:
    """Fill in what the arguments leave open with what suits the type of the model."""
    model_type = config.model_type
    known = {**TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, **_TARGET_MODULES}
    target_modules = lora.target_modules or known.get(model_type)
    if target_modules is None:
        raise ModelError(f"no default for a model of type {model_type!r}; give --target_modules")
    return LoraConfig(
        task_type=task_type,
        r=lora.lora_r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=target_modules,
        modules_to_save=lora.modules_to_save or head_modules,
        fan_in_fan_out=model_type == "gpt2",
    )


def adapt(base: PreTrainedModel, adapters: LoraConfig) -> PeftModel | PeftMixedModel:
    """Put LoRA on a model.

    Raises:
        ModelError: when there are no such modules, or LoRA has nothing for their kind.
    """
    names = {name.rpartition(".")[2] for name, _ in base.named_modules()}
    absent = [
        name for name in adapters.modules_to_save or () if name.rpartition(".")[2] not in names
    ]
    if absent:
        raise ModelError(f"--modules_to_save {' '.join(absent)}: not found in the model")
    try:
        return get_peft_model(base, adapters)
    except ValueError as error:
        wanted = " ".join(sorted(adapters.target_modules or ()))
        raise ModelError(f"--target_modules {wanted}: {error}") from error
