r"""Fine-tune a text classifier with LoRA in a plain accelerate loop, activations under a budget.

    python examples/accelerate_loop.py --model path/or/name --train train.tsv --dev dev.tsv \
        --budget_mb 20

Also with several processes, each with an arena and a budget of its own:

    accelerate launch --num_processes 2 examples/accelerate_loop.py ...

The files have a header, and a column for the text and one for the label, as GLUE's SST-2 has. The
adapter and what DAF held (``daf_report.json``) go to ``--output_dir``.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_scheduler

from daf_hf import compress_activations

Row = tuple[str, int]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", required=True, help="a folder, or a name on the Hub")
    parser.add_argument("--train", type=Path, required=True, help=".tsv or .csv file")
    parser.add_argument("--dev", type=Path, required=True, help=".tsv or .csv file")
    parser.add_argument("--text", default="sentence", help="column of the texts")
    parser.add_argument("--label", default="label", help="column of the labels, 0 and up")
    parser.add_argument("--budget_mb", type=float, default=math.inf, help="inf: plain training")
    parser.add_argument("--batch_size", type=int, default=32, help="examples a process and step")
    parser.add_argument("--accumulate", type=int, default=1, help="steps to one optimizer step")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/accelerate"))
    return parser.parse_args(argv)


def read(path: Path, text: str, label: str) -> list[Row]:
    """The rows of a file with a header."""
    tabs = path.suffix == ".tsv"
    options: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {}
    with path.open(encoding="utf-8", newline="") as file:
        return [(row[text], int(row[label])) for row in csv.DictReader(file, **options)]


def collate(rows: list[Row], tokenizer: Any, max_tokens: int) -> dict[str, torch.Tensor]:
    """A batch, padded to its longest text."""
    texts, labels = zip(*rows, strict=True)
    batch = tokenizer(
        list(texts), padding=True, truncation=True, max_length=max_tokens, return_tensors="pt"
    )
    return {**batch, "labels": torch.tensor(labels)}


@torch.no_grad()
def accuracy(model: torch.nn.Module, loader: DataLoader, accelerator: Accelerator) -> float:
    """The share of examples, of all processes, that the model labels rightly."""
    model.eval()
    right = []
    for batch in loader:
        found = model(**batch).logits.argmax(-1) == batch["labels"]
        right.append(accelerator.gather_for_metrics(found))
    model.train()
    return torch.cat(right).float().mean().item()


def main(argv: list[str] | None = None) -> float:
    """Train and evaluate; returns the accuracy on the validation file."""
    args = parse_arguments(argv)
    set_seed(args.seed)
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)

    train, dev = (read(path, args.text, args.label) for path in (args.train, args.dev))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model, num_labels=1 + max(label for _, label in train)
    )
    model = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_dropout=0.1))
    batches = partial(
        DataLoader,
        batch_size=args.batch_size,
        collate_fn=partial(collate, tokenizer=tokenizer, max_tokens=args.max_tokens),
    )
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate)
    train_loader, dev_loader = batches(train, shuffle=True), batches(dev)  # type: ignore[arg-type]
    model, optimizer, train_loader, dev_loader = accelerator.prepare(
        model, optimizer, train_loader, dev_loader
    )
    steps = args.epochs * math.ceil(len(train_loader) / args.accumulate)
    scheduler = accelerator.prepare(
        get_scheduler("linear", optimizer, 0, steps * accelerator.num_processes)
    )

    model.train()
    # The prepared model's own module: what accelerate wraps around it is left alone.
    with compress_activations(accelerator.unwrap_model(model), budget_mb=args.budget_mb) as daf:
        for epoch in range(args.epochs):
            for batch in train_loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    daf.step()
            score = accuracy(model, dev_loader, accelerator)
            accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {score:.3f}")

    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir)
        daf.report.to_json(args.output_dir / "daf_report.json")
        (args.output_dir / "results.json").write_text(json.dumps({"accuracy": score}))
    accelerator.print(daf.report)
    return score


if __name__ == "__main__":
    main()
