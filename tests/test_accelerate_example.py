"""The accelerate loop of the examples, as a user runs it."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
)

SCRIPT = Path(__file__).parents[1] / "examples" / "accelerate_loop.py"
GOOD, BAD = ["fine", "good", "great"], ["bad", "poor", "dull"]
OTHERS = ["the", "film", "was", "and", "a", "story"]
OPTIONS = ("--batch_size", "16", "--learning_rate", "0.02", "--epochs", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with its tokenizer, and sentences that some words decide."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("accelerate")
    words = ["<pad>", "<unk>", *GOOD, *BAD, *OTHERS]
    bare = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", unk_token="<unk>")
    tokenizer.save_pretrained(path / "model")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
    )
    BertForSequenceClassification(config).save_pretrained(path / "model")
    draw = random.Random(0)
    for name, rows in (("train", 320), ("dev", 64)):
        lines = ["sentence\tlabel"]
        for index in range(rows):
            others = draw.choices(OTHERS, k=draw.randint(3, 6))
            telling = draw.choices((BAD, GOOD)[index % 2], k=4)
            text = " ".join(draw.sample([*others, *telling], len(others) + 4))
            lines.append(f"{text}\t{index % 2}")
        (path / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("accelerate_loop", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(folder, out, *more):
    files = ("--train", str(folder / "train.tsv"), "--dev", str(folder / "dev.tsv"))
    return ["--model", str(folder / "model"), *files, "--output_dir", str(out), *OPTIONS, *more]


@pytest.mark.supports("Others' trainers", "an accelerate loop (examples/accelerate_loop.py)")
def test_it_learns_within_the_budget(folder, script, tmp_path):
    score = script.main(arguments(folder, tmp_path, "--budget_mb", "0.5", "--accumulate", "2"))
    report = json.loads((tmp_path / "daf_report.json").read_text())
    assert score > 0.9
    assert 0 < report["held_bytes_peak"] <= report["budget_bytes"] == 0.5e6
    assert report["ratio"] > 1.5
    base = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=2)
    assert PeftModel.from_pretrained(base, tmp_path).peft_config


@pytest.mark.supports("Others' trainers", "an accelerate loop (examples/accelerate_loop.py)")
def test_in_two_processes(folder, tmp_path):
    launch = [sys.executable, "-W", "ignore", "-m", "accelerate.commands.launch"]
    setup = ["--num_processes", "2", "--cpu", "--main_process_port", "0", "--mixed_precision", "no"]
    found = subprocess.run(
        [*launch, *setup, str(SCRIPT), *arguments(folder, tmp_path, "--budget_mb", "0.5")],
        capture_output=True,
        encoding="utf-8",
        timeout=280,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert json.loads((tmp_path / "results.json").read_text())["accuracy"] > 0.9
    assert found.stdout.count("epoch 2:") == 1
