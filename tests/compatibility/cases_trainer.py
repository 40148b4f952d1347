"""Options of Trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from harness import Training, case
from tiny import batch, build, needs_compiler
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

AREA = "Trainer"
IGNORED = -100


class Examples(Dataset):
    """Rows of a model's batch, again and again."""

    def __init__(self, name, examples=32):
        self.inputs = batch(name, examples)

    def __len__(self):
        return len(self.inputs["labels"])

    def __getitem__(self, index):
        return {key: values[index] for key, values in self.inputs.items()}


class Uneven(Examples):
    """Every example has a length of its own, and half of its tokens for labels."""

    def __getitem__(self, index):
        tokens = 6 + 5 * index % 11
        row = {key: values[:tokens].clone() for key, values in super().__getitem__(index).items()}
        row["labels"][: tokens // 2] = IGNORED
        return row


def padded(rows):
    """A batch of rows of several lengths."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    return {
        key: nn.utils.rnn.pad_sequence([row[key] for row in rows], True, value)
        for key, value in fill.items()
    }


def trainer(
    name: str,
    kind: type[Trainer] = Trainer,
    arguments: type[TrainingArguments] = TrainingArguments,
    attached: bool = False,
    data: Dataset | None = None,
    given: dict[str, Any] | None = None,
    **options: Any,
) -> Training:
    """A subject: the trainer of a tiny model with these training arguments.

    Args:
        name: of the model.
        kind: of trainer.
        arguments: their class.
        attached: see :class:`Training`.
        data: to train on.
        given: more that the trainer is given.
        options: training arguments.
    """
    model = build(name)
    more = given or {}

    def make(folder, steps, callbacks):
        values = {
            "max_steps": steps,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-2,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        }
        return kind(
            model,
            arguments(str(folder), **values),
            train_dataset=data or Examples(name),
            callbacks=callbacks + more.get("callbacks", []),
            **{key: value for key, value in more.items() if key != "callbacks"},
        )

    return Training(model, make, attached)


@case(AREA, "the defaults")
def defaults() -> Training:
    return trainer("roberta")


@case(AREA, "gradient accumulation")
def accumulation() -> Training:
    return trainer("gpt2", gradient_accumulation_steps=2)


@case(
    AREA,
    "`num_items_in_batch`: micro-batches with unequal numbers of labels",
    needs=("transformers>=5",),
)
def unequal() -> Training:
    return trainer(
        "gpt2",
        data=Uneven("gpt2"),
        given={"data_collator": padded},
        gradient_accumulation_steps=2,
        train_sampling_strategy="group_by_length",
    )


@case(AREA, "a smaller last batch, `max_grad_norm`, Adafactor")
def smaller_last_batch() -> Training:
    data = Examples("roberta", 20)
    return trainer("roberta", data=data, optim="adafactor", max_grad_norm=0.1)


@case(AREA, "`torch_compile=True`")
def compiled() -> Training:
    needs_compiler(backend="aot_eager")
    torch._dynamo.reset()
    return trainer("roberta", torch_compile=True, torch_compile_backend="aot_eager")


@case(AREA, "NEFTune", lacks={"exception": "Trainer leaves NEFTune's hook on the model then"})
def neftune() -> Training:
    return trainer("llama", neftune_noise_alpha=5.0)


@case(AREA, "label smoothing, with `attach`")
def label_smoothing() -> Training:
    return trainer("gpt2", attached=True, label_smoothing_factor=0.1)


@case(AREA, "label smoothing, the callback alone")
def label_smoothing_alone() -> Training:
    return trainer("gpt2", label_smoothing_factor=0.1)


def focal(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss that weighs hard examples more."""
    losses = nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


@case(AREA, "`compute_loss_func`, with `attach`")
def loss_function() -> Training:
    return trainer("roberta", attached=True, given={"compute_loss_func": focal})


class Weighted(Trainer):
    """Computes its loss itself, from the model's outputs."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels, torch.tensor([0.3, 0.7]))
        return (loss, outputs) if return_outputs else loss


@case(AREA, "an overridden `compute_loss`, with `attach`")
def own_loss() -> Training:
    return trainer("roberta", kind=Weighted, attached=True)


@case(AREA, "an overridden `compute_loss`, the callback alone")
def own_loss_alone() -> Training:
    return trainer("roberta", kind=Weighted)


class Generating(TrainerCallback):
    """Generates after each step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.eval()
        with torch.no_grad():
            model.generate(input_ids=batch("llama", 2)["input_ids"], max_new_tokens=2)


@case(AREA, "evaluation and generation after each step")
def generation() -> Training:
    given = {"callbacks": [Generating()], "eval_dataset": Examples("llama", 4)}
    return trainer("llama", given=given, eval_strategy="steps", eval_steps=1)


@case(AREA, "Seq2SeqTrainer, `predict_with_generate`")
def sequence_to_sequence() -> Training:
    config = GenerationConfig(max_new_tokens=2, decoder_start_token_id=0, pad_token_id=0)
    return trainer(
        "t5",
        Seq2SeqTrainer,
        partial(Seq2SeqTrainingArguments, generation_config=config, predict_with_generate=True),
        given={"eval_dataset": Examples("t5", 4)},
        eval_strategy="steps",
        eval_steps=1,
    )
