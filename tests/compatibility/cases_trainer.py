"""Options of Trainer."""

from __future__ import annotations

from harness import Training, case
from tiny import batch, build
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Examples(Dataset):
    """Rows of a model's batch, again and again."""

    def __init__(self, name, examples=32):
        self.inputs = batch(name, examples)

    def __len__(self):
        return len(self.inputs["labels"])

    def __getitem__(self, index):
        return {key: values[index] for key, values in self.inputs.items()}


def trainer(name, **arguments):
    """A subject: the Trainer of a tiny model with these training arguments."""
    model = build(name)

    def make(folder, steps, callbacks):
        options = {
            "max_steps": steps,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-2,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            **arguments,
        }
        return Trainer(
            model,
            TrainingArguments(str(folder), **options),
            train_dataset=Examples(name),
            callbacks=callbacks,
        )

    return Training(model, make)


@case("Trainer", "the defaults")
def defaults() -> Training:
    return trainer("roberta")


@case("Trainer", "gradient accumulation")
def accumulation() -> Training:
    return trainer("gpt2", gradient_accumulation_steps=2)
