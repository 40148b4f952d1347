"""Does ``budget_mb="auto"`` train where the system kills plain training?

    sudo python benchmarks/memory_limit.py --limit_mb 1300 --seconds 600

A control group of so much memory (cgroup v1 or v2; making one needs root) holds a training, plain
or under ``budget_mb="auto"``, and, beside the latter, a neighbour that takes 100 to 400 MB within
seconds, keeps them for a while, and gives them back. Printed are the steps made, whether the
kernel killed the training, how often the group ran into its limit, and the budgets.

The model is of MiniLM-L6's size, from its configuration, with LoRA, on random tokens, 32 x 64.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
TAKEN_MB = 10
"""That the neighbour takes at a time, twenty times a second."""


class Group:
    """A control group with a limit of memory."""

    def __init__(self, limit_bytes: int) -> None:
        old = (MOUNT / "memory").is_dir()
        self.folder = (MOUNT / "memory" if old else MOUNT) / f"daf_hf_{os.getpid()}"
        self._limit = "memory.limit_in_bytes" if old else "memory.max"
        self.folder.mkdir()
        self._write(self._limit, limit_bytes)
        if not old:
            self._write("memory.swap.max", 0)
        self._hits = "memory.failcnt" if old else "memory.events"

    def _write(self, name: str, value: int) -> None:
        (self.folder / name).write_text(str(value), encoding="utf-8")

    def run(self, *arguments: str) -> subprocess.Popen:
        """This script in the group, with other arguments."""

        def join() -> None:
            self._write("cgroup.procs", os.getpid())

        command = [sys.executable, __file__, *arguments]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=join
        )

    def hits(self) -> int:
        """How often the limit was run into."""
        words = (self.folder / self._hits).read_text(encoding="utf-8").split()
        return int(words[0] if len(words) == 1 else words[words.index("max") + 1])


@contextmanager
def group(limit_bytes: int):
    """A group, for a while."""
    made = Group(limit_bytes)
    try:
        yield made
    finally:
        made.folder.rmdir()


def train(budget: str, seconds: float, headroom_mb: float) -> dict[str, object]:
    """Train for so long; returns steps and budgets."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    from daf_hf import compress_activations

    torch.manual_seed(0)
    sizes = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    lora = LoraConfig(r=8, lora_dropout=0.1, target_modules=["query", "value"])
    model = get_peft_model(BertForSequenceClassification(sizes), lora).train()
    ids = torch.randint(3, 30000, (32, 64))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    options = {"headroom_mb": headroom_mb, "budget_step_mb": 10.0}
    daf = None if budget == "plain" else compress_activations(model, budget_mb=budget, **options)
    end, steps, budgets = time.monotonic() + seconds, 0, []
    with daf or nullcontext():
        while time.monotonic() < end:
            model(input_ids=ids, labels=ids[:, 0] % 2).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if daf is not None:
                daf.step()
                budgets.append(daf.report.budget_bytes / 1e6)
    return {"steps": steps, "budgets": budgets}


def trouble(seconds: float) -> None:
    """Take memory and give it back, again and again."""
    draw, end = random.Random(1), time.monotonic() + seconds
    while time.monotonic() < end:
        kept = []
        for _ in range(draw.randint(100, 400) // TAKEN_MB):
            kept.append(b"\1" * (TAKEN_MB * 10**6))
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 8))
        kept.clear()
        time.sleep(draw.uniform(0, 8))


def measure(options: argparse.Namespace, budget: str, beside: bool) -> list[str]:
    """A row of the table."""
    with group(int(options.limit_mb * 1e6)) as made:
        arguments = ["--train", budget, "--seconds", str(options.seconds)]
        training = made.run(*arguments, "--headroom_mb", str(options.headroom_mb))
        neighbour = made.run("--trouble", "--seconds", "1e9") if beside else None
        output, _ = training.communicate()
        if neighbour is not None:
            neighbour.kill()
            neighbour.communicate()
        hits = made.hits()
    name = f"{budget}, beside a neighbour" if beside else budget
    if training.returncode == -signal.SIGKILL:
        return [name, "-", "yes", str(hits), "-"]
    found = json.loads(output)
    budgets = found["budgets"]
    span = f"{min(budgets):.0f} to {max(budgets):.0f}" if budgets else "-"
    return [name, str(found["steps"]), "no", str(hits), span]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit_mb", type=float, default=1300, help="of the group")
    parser.add_argument("--headroom_mb", type=float, default=200, help="to keep free")
    parser.add_argument("--seconds", type=float, default=600, help="of each training")
    parser.add_argument("--train", metavar="BUDGET", help="only train: plain or auto")
    parser.add_argument("--trouble", action="store_true", help="only be the neighbour")
    options = parser.parse_args()
    if options.train:
        print(json.dumps(train(options.train, options.seconds, options.headroom_mb)))
    elif options.trouble:
        trouble(options.seconds)
    else:
        from daf_hf.tables import render_table  # imports torch, which the neighbour does without

        ways = [("plain", False), ("auto", False), ("auto", True)]
        rows = [measure(options, *way) for way in ways]
        head = ("training", "steps", "killed", "limit hit", "budget, MB")
        print(render_table(f"{options.limit_mb:g} MB", head, rows, 1, ""))


if __name__ == "__main__":
    main()
