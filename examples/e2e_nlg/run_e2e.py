r"""Fine-tune a causal language model with LoRA on E2E NLG, under a budget for saved activations.

    python examples/e2e_nlg/run_e2e.py --model_name_or_path smollm2 --data_dir path/to/e2e_nlg \
        --budget_mb 40 --max_steps 300 --learning_rate 1e-3 --per_device_train_batch_size 8 \
        --output_dir outputs/e2e

A prompt is a meaning representation (MR); the loss is that of the reference alone. Takes all of
`transformers.TrainingArguments` besides its own options (``--help``). With none of ``--do_train``,
``--do_eval`` (loss on the validation set) and ``--do_predict`` (texts for the test set's MRs, and
their official scores), it does all three. The output folder gets ``all_results.json``,
``predictions.txt`` (one output a line), ``daf_report.json`` and the adapter.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import evaluate
import torch
from datasets import Dataset
from e2e_data import DataError, group_references, load_splits, write_predictions
from generation import GenerationArguments, generate
from peft import PeftMixedModel, PeftModel, TaskType
from smollm2 import smollm2_folder
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

import daf_hf
from daf_hf.host_memory import tune_malloc

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import models
from common.memory import PeakMemoryCallback
from common.models import LoraArguments
from common.options import UsageError, require_least
from common.training import DAFArguments, daf_config, parse, run, train

METRICS_MODULE = Path(__file__).with_name("metrics.py")
IGNORED = -100  # label of tokens that the loss leaves out


@dataclass
class ModelArguments(models.ModelArguments):
    """Which model to fine-tune."""

    model_name_or_path: str = field(
        default="smollm2",
        metadata={"help": "A folder, a name on the Hub, or `smollm2` (make smollm2)."},
    )


@dataclass
class DataArguments:
    """The data, and how much of it is used."""

    data_dir: str | None = field(
        default=None, metadata={"help": "Folder of the original csv files; else the Hub."}
    )
    max_seq_length: int = field(
        default=256, metadata={"help": "Cut MR and reference, together, to so many tokens."}
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Train on the first so many examples only."}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Validation loss on the first so many examples only."}
    )
    max_predict_samples: int | None = field(
        default=None, metadata={"help": "Generate for the first so many MRs only."}
    )

    def __post_init__(self) -> None:
        counts = ("max_train_samples", "max_eval_samples", "max_predict_samples")
        require_least(self, max_seq_length=1, **dict.fromkeys(counts, 1))


Arguments = tuple[
    ModelArguments,
    DataArguments,
    LoraArguments,
    GenerationArguments,
    DAFArguments,
    TrainingArguments,
]


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    """Parse the command line; with no --do_train, --do_eval or --do_predict, do all three."""
    parser = HfArgumentParser(list(get_args(Arguments)))
    parsed = parse(parser, argv)
    training = parsed[-1]
    if not (training.do_train or training.do_eval or training.do_predict):
        training.do_train = training.do_eval = training.do_predict = True
    if not torch.cuda.is_available():
        training.dataloader_pin_memory = False
    training.prediction_loss_only = True  # the logits of a whole vocabulary are of no use
    daf = parsed[-2]
    if training.label_smoothing_factor and daf.skip_padding is None:
        daf.skip_padding = False if not daf.no_daf else None  # the loss is not the model's own
    return parsed


def load_model_parts(
    args: ModelArguments,
) -> tuple[str, PretrainedConfig, PreTrainedTokenizerBase]:
    """Return the model's folder or name, its configuration and its tokenizer."""
    name = args.model_name_or_path
    needed = not args.model_type or not args.tokenizer_name
    path = smollm2_folder() if name == "smollm2" and needed else name
    config = models.load_config(args, str(path))
    config.use_cache = False  # generation asks for its cache itself
    return str(path), config, models.load_tokenizer(args.tokenizer_name or str(path), config)


def build_model(
    args: ModelArguments, lora: LoraArguments, path: str, config: PretrainedConfig
) -> PeftModel | PeftMixedModel:
    """Create the language model in float32 and put LoRA on it."""
    adapters = models.lora_config(lora, config, TaskType.CAUSAL_LM)
    if args.from_config:
        base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        models.require_weights(path)
        base = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32)
    return models.adapt(base, adapters)


def encode_prompt(mr: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of an MR and the line break that ends it."""
    return tokenizer(mr + "\n")["input_ids"]  # type: ignore[return-value]


def tokenize(pairs: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Return token ids of MR and reference, with labels for the reference and its end alone.

    Pairs of which ``max_length`` leaves nothing of the reference are left out.
    """

    def encode(pair):
        prompt = encode_prompt(pair["mr"], tokenizer)
        answer = tokenizer(pair["ref"], add_special_tokens=False)["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        ids = [*prompt, *answer][:max_length]
        return {
            "input_ids": ids,
            "attention_mask": [1] * len(ids),
            "labels": [*[IGNORED] * len(prompt), *answer][:max_length],
        }

    rows = pairs.map(encode, remove_columns=pairs.column_names, desc="tokenizing")
    whole = rows.filter(lambda row: any(label != IGNORED for label in row["labels"]))
    lost = len(rows) - len(whole)
    if lost == len(rows):
        raise UsageError(f"--max_seq_length {max_length}: that leaves nothing of any reference")
    if lost:
        print(f"{lost} of {len(rows)} pairs are left out: nothing of their references remains")
    return whole


def first(dataset: Dataset, count: int | None) -> Dataset:
    """Return the first ``count`` rows, or all."""
    return dataset if count is None else dataset.select(range(min(count, len(dataset))))


def load_metric() -> evaluate.EvaluationModule:
    """Load the official metrics, or say which packages they miss."""
    try:
        return evaluate.load(str(METRICS_MODULE), keep_in_memory=True)
    except ImportError as error:
        raise UsageError(f"{error}\n(all of them: pip install 'daf-hf[e2e]')") from error


def predict(
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Dataset,
    count: int | None,
    options: GenerationArguments,
    metric: evaluate.EvaluationModule,
) -> None:
    """Generate a text for each distinct MR, write all of them, and score them."""
    mrs, references = group_references(pairs.to_list())
    mrs, references = mrs[:count], references[:count]
    prompts = [encode_prompt(mr, tokenizer) for mr in mrs]
    batch_size = trainer.args.per_device_eval_batch_size
    outputs = generate(trainer.model, tokenizer, prompts, options, batch_size)  # type: ignore[arg-type]
    write_predictions(Path(trainer.args.output_dir or ".") / "predictions.txt", outputs)
    scores = metric.compute(predictions=outputs, references=references)
    assert scores is not None
    metrics = {f"test_{name}": value for name, value in scores.items()}
    trainer.log_metrics("test", metrics)
    trainer.save_metrics("test", metrics)


def main(argv: list[str] | None = None) -> None:
    """Run the script with the given arguments, or those of the command line."""
    model_args, data_args, lora_args, generation_args, daf_args, training_args = parse_arguments(
        argv
    )
    config = daf_config(daf_args) if training_args.do_train else None
    # transformers' own use of a name that it has deprecated.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    set_seed(training_args.seed)
    # DAF sets this for itself; plain runs get it too, so that their peak memory compares.
    tune_malloc()

    metric = load_metric() if training_args.do_predict else None  # before the training
    path, model_config, tokenizer = load_model_parts(model_args)
    max_length = min(data_args.max_seq_length, models.max_tokens(model_config, tokenizer))
    splits = load_splits(data_args.data_dir)
    training_data = first(splits["train"], data_args.max_train_samples)
    validation_data = first(splits["validation"], data_args.max_eval_samples)
    memory = PeakMemoryCallback()
    trainer = Trainer(
        model=build_model(model_args, lora_args, path, model_config),
        args=training_args,
        train_dataset=tokenize(training_data, tokenizer, max_length),  # type: ignore[arg-type]
        eval_dataset=tokenize(validation_data, tokenizer, max_length),  # type: ignore[arg-type]
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED),
        processing_class=tokenizer,
        callbacks=[memory],
    )
    if training_args.do_train:
        # attach() covers a loss outside of the model too: that of label smoothing.
        daf = daf_hf.attach(trainer, config) if config is not None else None
        train(trainer, daf, memory)
    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if metric is not None:
        count = data_args.max_predict_samples
        predict(trainer, tokenizer, splits["test"], count, generation_args, metric)


if __name__ == "__main__":
    run(main, DataError)
