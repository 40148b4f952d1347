r"""What does a calibration take, and do fewer examples rank save sites alike?

    python benchmarks/calibration.py --model roberta --batch_size 32
    python benchmarks/calibration.py --ranks 1 2 4 --data_dir path/to/glue --task mrpc

The first trains a model from its configuration, with LoRA, on random tokens, and compares the time
of calibrations, and of their passes, with that of a plain step: processor time of this process, so
that other programs do not count. One thread unless OMP_NUM_THREADS says otherwise.

The second takes MiniLM after some steps of training (as ``ablations.py`` does), measures
importances on 16 examples, and ranks the sites by what fewer of these tell (Spearman's
correlation, mean over all parts of the batch).
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from statistics import mean
from typing import Any

import ablations
import torch
from peft import LoraConfig, get_peft_model
from scipy.stats import spearmanr
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from daf_hf import calibration, compress_activations, gauge

EXAMPLES = 16
PASSES = {"pilot": "_pilot", "survey": "_survey", "probe graphs": "_measure_at"}
Batch = dict[str, Tensor]


def build(name: str) -> nn.Module:
    """A model of roberta-base's or MiniLM-L6's size with random weights, and LoRA."""
    if name == "roberta":
        sizes = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
        model: Any = RobertaForSequenceClassification(sizes)
    else:
        model = BertForSequenceClassification(
            BertConfig(
                hidden_size=384,
                num_hidden_layers=6,
                num_attention_heads=12,
                intermediate_size=1536,
            )
        )
    lora = LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["query", "value"],
        modules_to_save=["classifier"],
    )  # fmt: skip
    return get_peft_model(model, lora).train()


def measure(model: nn.Module, batch: Batch, **options: Any) -> dict[str, tuple[float, float]]:
    """Importance, and error at 0 bits, of each site that was measured, by name."""
    with compress_activations(model, **options) as daf:
        session = daf._session
        # The last session's wrapper of the model's forward is gone: this is the model's own.
        forward = model.forward.__wrapped__.__get__(model)  # type: ignore[attr-defined]
        session.compressor.begin_forward()
        session._calibrate(forward, ((), batch))
        return {
            site.name: (site.importance, site.error_at_zero)
            for site in session.compressor.tracker.sites.values()
            if site.importance is not None and site.error_at_zero is not None
        }


def timed(owner: type, name: str, spent: Counter[str], label: str) -> None:
    """Have a method's time added up under a label."""
    method: Callable[..., Any] = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent[label] += time.process_time() - began

    setattr(owner, name, wrapper)


def times(options: argparse.Namespace) -> None:
    """Print what calibrations take, in seconds and in steps of plain training."""
    torch.manual_seed(0)
    model, size = build(options.model), (options.batch_size, options.tokens)
    batch = {
        "input_ids": torch.randint(5, 20000, size),
        "attention_mask": torch.ones(size, dtype=torch.int64),
        "labels": torch.randint(0, 2, size[:1]),
    }
    steps = []
    for _ in range(options.steps):
        began = time.process_time()
        model(**batch).loss.backward()
        steps.append(time.process_time() - began)
        model.zero_grad()
    step = min(steps)
    spent: Counter[str] = Counter()
    for label, name in PASSES.items():
        timed(calibration.Calibration, name, spent, label)
    timed(gauge.Gauge, "distortions", spent, "of the survey, codecs")
    timed(calibration.Calibration, "run", spent, "all")
    rows = []
    with compress_activations(
        model, budget_mb=options.budget_mb, calibration_batch=options.calibration_batch
    ) as daf:
        session = daf._session
        forward = model.forward.__wrapped__.__get__(model)
        for number in range(options.calibrations):
            spent.clear()
            session.step = number
            session.compressor.begin_forward()
            session.schedule.calibrated_at = None  # as if it were asked for
            session._calibrate(forward, ((), batch))
            rows += [
                {"calibration": number + 1, "pass": label, "seconds": seconds,
                 "steps": seconds / step}
                for label, seconds in spent.items()
            ]  # fmt: skip
    ablations.print_table(f"A plain step takes {step:.2f} s", rows)


def ranks(options: argparse.Namespace) -> None:
    """Print how well few examples rank the sites."""
    names = ("task", "data_dir", "steps")
    given = [f"--{n}={v}" for n in names if (v := getattr(options, n)) is not None]
    model, batch = ablations.trained(ablations.parse([*given, f"--batch_size={EXAMPLES}"]))
    truth = measure(model, batch, budget_mb=1e4, calibration_batch=EXAMPLES)
    rows = []
    for count in options.ranks:
        found = [
            measure(
                model,
                {name: each[start : start + count] for name, each in batch.items()},
                budget_mb=1e4,
                calibration_batch=count,
            )
            for start in range(0, EXAMPLES, count)
        ]
        importance, at_zero = (
            mean(float(spearmanr([f[s][i] for s in truth], [t[i] for t in truth.values()])[0])
                 for f in found)
            for i in (0, 1)
        )  # fmt: skip
        rows.append({"examples": count, "sites": len(truth), "importance": importance,
                     "at 0 bits": at_zero})  # fmt: skip
    ablations.print_table(f"Rank correlation with {EXAMPLES} examples", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=("roberta", "minilm"), default="minilm")
    add("--batch_size", type=int, default=32)
    add("--tokens", type=int, default=128)
    add("--budget_mb", type=float, default=300)
    add("--calibration_batch", type=int, default=4)
    add("--calibrations", type=int, default=2)
    add("--steps", type=int, default=3, help="of plain training")
    add("--ranks", type=int, nargs="+", choices=(1, 2, 4, 8), help="examples to rank by")
    add("--task", default="mrpc", help="of --ranks")
    add("--data_dir", help="GLUE's original files; else the Hub")
    options = parser.parse_args()
    if options.ranks:
        ranks(options)
    else:
        times(options)


if __name__ == "__main__":
    main()
