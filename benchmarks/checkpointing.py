r"""What do DAF and gradient checkpointing save, alone and together, and what does it take?

    python benchmarks/checkpointing.py --budget_mb 300
    python benchmarks/checkpointing.py --layers 6 --width 384 --tokens 64 --budget_mb 15
    python benchmarks/checkpointing.py --family gpt2 --layers 24 --width 1024 --heads 16 \
        --examples 8 --budget_mb 150 --modes plain daf checkpointing

RoBERTa or GPT-2 from its configuration with random weights (base size unless told otherwise) and
LoRA, on random tokens; each mode in a process of its own. ``daf`` is under the budget; with
checkpointing there is a budget too, of ``--checkpoint_budget_mb``, once with the regions' inputs
kept exactly and once with ``checkpoint_inputs=8``. ``held`` is what is held for backward at the
worst moment, but for what a region holds while it runs again; that is in the peak of resident
memory above the model. Time is processor time of this process, so that other programs do not count
(OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from daf_hf import compress_activations
from daf_hf.accounting import ResidentPeak
from daf_hf.host_memory import tune_malloc
from daf_hf.tables import measured, render_table

MODES = ("plain", "daf", "checkpointing", "daf + checkpointing", "the same, inputs in 8 bits")
WARM_UP = 2
"""Steps that do not count, of which the first calibrates."""

Row = dict[str, Any]


def roberta(options: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """A classifier, and what LoRA is to do with it."""
    config = RobertaConfig(
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=4 * options.width,
        max_position_embeddings=514,
    )
    lora = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
    return RobertaForSequenceClassification(config), lora


def gpt2(options: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """A language model, and what LoRA is to do with it."""
    config = GPT2Config(
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.heads,
        n_positions=max(options.tokens, 1024),
        use_cache=False,
    )
    return GPT2LMHeadModel(config), {"target_modules": ["c_attn"], "fan_in_fan_out": True}


FAMILIES = {"roberta": roberta, "gpt2": gpt2}


def build(options: argparse.Namespace, checkpointing: bool) -> nn.Module:
    """The model, in training mode."""
    torch.manual_seed(0)
    # transformers' own use of a name that it has deprecated.
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
    plain, lora = FAMILIES[options.family](options)
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, **lora)
    model: Any = get_peft_model(plain, config)  # type: ignore[arg-type]
    if checkpointing:
        model.enable_input_require_grads()
        model.config.use_cache = False
        base = model.base_model.model
        enable = getattr(base, "activation_checkpointing_enable", None)
        (enable or base.gradient_checkpointing_enable)({"use_reentrant": False})
    return model.train()


def measure(mode: str, options: argparse.Namespace) -> Row:
    """One mode: held bytes, peak of resident memory, and time of a step."""
    tune_malloc()  # for all modes, so that resident memory compares
    checkpointing = "daf" != mode != "plain"
    model = build(options, checkpointing)
    size = options.examples, options.tokens
    ids = torch.randint(3, 500, size, generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    classifies = options.family == "roberta"
    batch["labels"] = torch.arange(options.examples) % 2 if classifies else ids
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
    scope, budget = None, math.inf
    if mode not in ("plain", "checkpointing"):
        budget = options.checkpoint_budget_mb if checkpointing else options.budget_mb
        inputs = 8 if mode == MODES[-1] else "exact"
        scope = compress_activations(
            model, budget_mb=budget, checkpoint_inputs=inputs, calibrate_at=(0,)
        )
    memory = ResidentPeak()
    times = [step(model, batch, optimizer, scope) for _ in range(WARM_UP + options.steps)][WARM_UP:]
    peak = memory.sample()
    if scope is None:
        scope = compress_activations(model)
        step(model, batch, optimizer, scope)
    report = scope.report
    return {
        "mode": mode,
        "budget_mb": budget,
        "held_mb": report.held_bytes_peak / 1e6,
        "peak_rss_mb": peak / 1e6,
        "step_s": statistics.median(times),
        "fastest_s": min(times),
        "error": report.predicted_gradient_error,
    }


def step(
    model: Any, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer, scope: Any
) -> float:
    """Processor seconds of a training step."""
    start = time.process_time()
    with scope or contextlib.nullcontext():
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seconds = time.process_time() - start
    if scope is not None:
        scope.step()
    return seconds


def table(rows: list[Row]) -> str:
    """The rows for people."""
    head = ("mode", "budget MB", "held MB", "peak RSS MB", "CPU s", "fastest", "error")
    cells = [
        (
            *(row["mode"], f"{row['budget_mb']:g}", f"{row['held_mb']:.1f}"),
            *(f"{row['peak_rss_mb']:.0f}", f"{row['step_s']:.2f}", f"{row['fastest_s']:.2f}"),
            measured(row["error"]),
        )
        for row in rows
    ]
    return render_table("Activations and checkpoints", head, cells, 6, "")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (
        *(("layers", 12), ("width", 768), ("heads", 12)),
        *(("examples", 32), ("tokens", 128), ("steps", 8)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--family", choices=FAMILIES, default="roberta")
    parser.add_argument("--budget_mb", type=float, required=True)
    parser.add_argument("--checkpoint_budget_mb", type=float, help="the same unless given")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--json", help="write the rows there too")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.checkpoint_budget_mb = options.checkpoint_budget_mb or options.budget_mb
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.child:
        print(json.dumps(measure(options.modes[0], options)))
        return
    rows = []
    for mode in options.modes:
        command = [sys.executable, __file__, *arguments, "--modes", mode, "--child"]
        done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(table(rows))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])
