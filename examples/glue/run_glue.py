r"""Fine-tune a model with LoRA on a GLUE task, with saved activations under a memory budget.

    python examples/glue/run_glue.py --model_name_or_path minilm --task_name sst2 \
        --data_dir path/to/glue --budget_mb 20 --max_steps 300 --learning_rate 1e-3 \
        --per_device_train_batch_size 32 --output_dir outputs/sst2

Takes all of `transformers.TrainingArguments` besides its own options (``--help``). The metrics
go to ``all_results.json`` in the output folder, what DAF held to ``daf_report.json``, and the
adapter beside them. ``--no_daf`` trains plainly, for comparison.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import evaluate
import torch
from datasets import Dataset
from glue_data import DataError, Task, get_task, load_splits
from glue_model import ModelArguments, build_config, build_model, build_tokenizer
from transformers import (
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from daf_hf import DAFCallback
from daf_hf.host_memory import tune_malloc

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.memory import PeakMemoryCallback
from common.models import LoraArguments, max_tokens
from common.options import UsageError, require_least
from common.training import DAFArguments, daf_config, parse, run, train

if TYPE_CHECKING:
    from collections.abc import Callable

METRICS_MODULE = Path(__file__).with_name("metrics.py")


@dataclass
class DataArguments:
    """Which task to train on, and how its texts become batches."""

    task_name: str = field(
        metadata={"help": "cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli, in any case."}
    )
    data_dir: str | None = field(
        default=None,
        metadata={"help": "Folder of the original .tsv files or the one above; else the Hub."},
    )
    skip_bad_rows: bool = field(
        default=False,
        metadata={"help": "Leave out unreadable rows instead of stopping at them."},
    )
    max_seq_length: int = field(default=128, metadata={"help": "Cut texts to so many tokens."})
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Train on the first so many examples only."}
    )
    pad_to_max_length: bool = field(
        default=False,
        metadata={"help": "Pad to --max_seq_length, not to the batch's longest."},
    )

    def __post_init__(self) -> None:
        require_least(self, max_seq_length=1, max_train_samples=1)


Arguments = tuple[ModelArguments, DataArguments, LoraArguments, DAFArguments, TrainingArguments]


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    """Parse the command line; with neither --do_train nor --do_eval, do both."""
    parser = HfArgumentParser(
        [ModelArguments, DataArguments, LoraArguments, DAFArguments, TrainingArguments]  # type: ignore[arg-type]
    )
    model, data, lora, daf, training = parse(parser, argv)
    if not (training.do_train or training.do_eval):
        training.do_train = training.do_eval = True
    if training.do_predict:
        raise UsageError("--do_predict: GLUE's test labels are not public, nothing to score")
    if not torch.cuda.is_available():
        training.dataloader_pin_memory = False
    return model, data, lora, daf, training


def tokenize(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    args: DataArguments,
    max_length: int,
) -> Dataset:
    """Replace the text columns by token ids."""
    texts = [name for name in ("text1", "text2") if name in dataset.column_names]

    def encode(batch):
        return tokenizer(
            *(batch[name] for name in texts),
            truncation=True,
            max_length=max_length,
            padding="max_length" if args.pad_to_max_length else False,
        )

    return dataset.map(encode, batched=True, remove_columns=texts, desc="tokenizing")


def load_tokenized(
    task: Task, args: DataArguments, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, Dataset]:
    """Load the task's splits as token ids, the training split cut as asked."""
    splits = load_splits(task, args.data_dir, args.skip_bad_rows)
    if args.max_train_samples is not None:
        count = min(args.max_train_samples, len(splits["train"]))
        splits["train"] = splits["train"].select(range(count))
    return {
        name: tokenize(dataset, tokenizer, args, max_length) for name, dataset in splits.items()
    }


def make_compute_metrics(task: Task) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return the function that scores the Trainer's predictions by the task's GLUE metrics."""
    metric = evaluate.load(str(METRICS_MODULE), task.name, keep_in_memory=True)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        logits = prediction.predictions
        if isinstance(logits, tuple):
            logits = logits[0]
        answers = logits.squeeze(-1) if task.is_regression else logits.argmax(-1)
        scores = metric.compute(predictions=answers, references=prediction.label_ids)
        assert scores is not None
        return scores

    return compute_metrics


def evaluate_splits(trainer: Trainer, splits: dict[str, Dataset]) -> None:
    """Score every validation split in full; MNLI's second one under the prefix ``eval_mm``."""
    metrics: dict[str, float] = {}
    for name, dataset in splits.items():
        if name != "train":
            prefix = "eval_mm" if name == "validation_mismatched" else "eval"
            metrics |= trainer.evaluate(dataset, metric_key_prefix=prefix)  # type: ignore[arg-type]
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def main(argv: list[str] | None = None) -> None:
    """Run the script with the given arguments, or those of the command line."""
    model_args, data_args, lora_args, daf_args, training_args = parse_arguments(argv)
    config = daf_config(daf_args) if training_args.do_train else None
    task = get_task(data_args.task_name)

    # transformers' own use of a name that it has deprecated.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    set_seed(training_args.seed)
    # DAF sets this for itself; plain runs get it too, so that their peak memory compares.
    tune_malloc()

    model_config = build_config(model_args, task)
    tokenizer = build_tokenizer(model_args, model_config)
    max_length = min(data_args.max_seq_length, max_tokens(model_config, tokenizer))
    splits = load_tokenized(task, data_args, tokenizer, max_length)
    model = build_model(model_args, lora_args, model_config)

    memory = PeakMemoryCallback()
    daf = DAFCallback(config) if config is not None else None
    validation = next(name for name in splits if name != "train")
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=splits["train"],  # type: ignore[arg-type]
        eval_dataset=splits[validation],  # type: ignore[arg-type]
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=make_compute_metrics(task),
        callbacks=[memory] if daf is None else [memory, daf],
    )
    if training_args.do_train:
        train(trainer, daf, memory)
    if training_args.do_eval:
        evaluate_splits(trainer, splits)


if __name__ == "__main__":
    run(main, DataError)
