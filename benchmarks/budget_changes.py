"""What a change of the budget costs, and gives back, in the middle of a training step.

Five questions, a table or picture each:

- a fall of the budget of an arena full of activations: time to drop planes, and to move pages
  together and give segments back;
- a fall in mid-forward: time, planes dropped, resident memory given back, and whether the plan at
  the old budget is afterwards what it was;
- one iteration under a budget that falls through its forward pass and rises through its backward
  pass (figure 13 of the paper), as a picture with ``--plot``;
- the same with budgets in steps of several sizes: moves, time, bytes that a step leaves
  unused, and bytes beyond what there was (the least budget is one step);
- a new plan for many save sites after a change of the budget, without calibrating.

The model is roberta-base's size from transformers' default configuration, with random weights and
LoRA (r = 8 on query and value).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import RobertaConfig, RobertaForSequenceClassification

from daf_hf import compress_activations
from daf_hf.arena import Arena
from daf_hf.codecs import Codec
from daf_hf.host_memory import tune_malloc
from daf_hf.kernels.format import PAGE_BYTES, Granularity
from daf_hf.stored import Stored
from daf_hf.tables import render_table

MB = 1e6


@dataclass
class Training:
    """A model, a batch of random tokens, and the compression of both."""

    model: nn.Module
    inputs: dict[str, torch.Tensor]
    layers: list[nn.Module]
    daf: compress_activations

    def step(self) -> None:
        with self.daf:
            loss = self.model(**self.inputs).loss
        loss.backward()
        self.model.zero_grad()
        self.daf.step()

    @property
    def arena(self) -> Any:
        return self.daf._session.compressor.arena


def training(options: argparse.Namespace) -> Training:
    torch.manual_seed(0)
    config = RobertaConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_attention_heads=options.hidden // 64,
        max_position_embeddings=514,
        type_vocab_size=1,
    )
    plain = RobertaForSequenceClassification(config).train()
    lora = LoraConfig(r=8, target_modules=["query", "value"], modules_to_save=["classifier"])
    with warnings.catch_warnings():
        # PEFT's use of a name that transformers has deprecated.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        model = get_peft_model(plain, lora)
    ids = torch.randint(3, 1000, (options.batch, options.tokens))
    inputs = {"input_ids": ids, "labels": ids[:, 0] % 2}
    daf = compress_activations(model, budget_mb=options.high, calibrate_at=(0,))
    made = Training(model, inputs, list(plain.roberta.encoder.layer), daf)
    for _ in range(3):
        made.step()
    return made


def at_layers(made: Training, act: Callable[[int, bool], None]) -> Callable[[], None]:
    """Call ``act(layer, forward)`` as the passes go on; returns what ends that."""

    def hook(number: int) -> Callable[..., None]:
        def passed(layer: nn.Module, inputs: Any, output: Any) -> None:
            act(number, True)
            tensor = output[0] if isinstance(output, tuple) else output
            if tensor.requires_grad:  # not while importances are measured
                tensor.register_hook(lambda gradient: act(number, False))

        return passed

    hooks = [layer.register_forward_hook(hook(n)) for n, layer in enumerate(made.layers)]

    def end() -> None:
        for each in hooks:
            each.remove()

    return end


def arena_alone(options: argparse.Namespace) -> dict[str, float]:
    """Pages of activations of roberta-base's sizes at 2 to 6 bits; nothing is encoded."""
    draw, arena, kept = random.Random(0), Arena(options.high * MB), []
    codec = Codec(Granularity.TOKEN, "normal")
    for numel in itertools.cycle((32 * 128 * 768, 32 * 128 * 3072, 32 * 12 * 128 * 128)):
        bits, scale = draw.randint(2, 6), draw.uniform(0.5, 2)
        costs = tuple(scale * 4.0**-b for b in range(9))
        kept.append(Stored(codec.layout(numel, 768, bits), bits, tuple(range(9)), costs))
        if not arena.insert(kept[-1]):
            break
    for segment in arena.space.segments:
        segment.fill_(1)  # or it would not be resident
    process = psutil.Process()
    resident, held = process.memory_info().rss, arena.held_bytes
    began = perf_counter()
    while arena.held_bytes > options.low * MB:
        arena.demote_cheapest()
    dropped = perf_counter()
    arena.set_limit(options.low * MB)
    ended = perf_counter()
    return {
        "demotions": arena.demotions,
        "dropped_mb": (held - arena.held_bytes) / MB,
        "dropping_milliseconds": (dropped - began) * 1e3,
        "moving_milliseconds": (ended - dropped) * 1e3,
        "resident_given_back_mb": (resident - process.memory_info().rss) / MB,
    }


def fall(made: Training, options: argparse.Namespace) -> dict[str, float]:
    """The budget falls when the last layer has been passed, and the arena is full."""
    before, found = made.daf._session.last_plan, {}
    process = psutil.Process()

    def act(layer: int, forward: bool) -> None:
        if layer != len(made.layers) - 1 or not forward or found:
            return
        arena = made.arena
        held, pages, resident = arena.held_bytes, arena.demoted_pages, process.memory_info().rss
        began = perf_counter()
        made.daf.set_budget(options.low)
        found["milliseconds"] = (perf_counter() - began) * 1e3
        found["resident_before_mb"] = resident / MB
        found["resident_given_back_mb"] = (resident - process.memory_info().rss) / MB
        found["held_before_mb"], found["held_after_mb"] = held / MB, arena.held_bytes / MB
        found["dropped_mb"] = (arena.demoted_pages - pages) * PAGE_BYTES / MB

    end = at_layers(made, act)
    made.step()
    end()
    found["step_held_at_the_end_mb"] = made.arena.held_bytes / MB
    made.step()
    found["error_low"] = made.daf._session.last_plan.error
    made.daf.set_budget(options.high)
    made.step()
    found["error_before"] = before.error
    found["error_after"] = made.daf._session.last_plan.error
    return found


def wanted(layer: int, forward: bool, layers: int, options: argparse.Namespace) -> float:
    """The budget that is to be had, in MB: least when the backward pass begins."""
    passed = (layer + 1) / layers
    return options.high - (options.high - options.low) * passed


def iteration(
    made: Training, options: argparse.Namespace, step_mb: float
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """One training step under a budget that falls and rises, in multiples of ``step_mb``."""
    trace, moves = [], []

    def act(layer: int, forward: bool) -> None:
        free = wanted(layer, forward, len(made.layers), options)
        budget = max(step_mb, free // step_mb * step_mb) if step_mb else free
        if budget * MB != made.arena.limit_bytes:
            began = perf_counter()
            made.daf.set_budget(budget)
            moves.append((perf_counter() - began) * 1e3)
        held, bits = made.arena.held_bytes / MB, made.arena.stored_bits
        mean = bits / made.arena.stored_elements if made.arena.stored_elements else 0.0
        limit = made.arena.limit_bytes / MB
        trace.append(
            {"free_mb": free, "budget_mb": limit, "held_mb": held, "mean_bits": mean}
            | {"forward": forward}
        )

    end = at_layers(made, act)
    made.step()
    end()
    made.daf.set_budget(options.high)
    unused = [row["free_mb"] - row["budget_mb"] for row in trace]
    return trace, {
        "step_mb": step_mb,
        "moves": len(moves),
        "milliseconds": sum(moves),
        "slowest_milliseconds": max(moves, default=0.0),
        "unused_mb": statistics.mean(max(0.0, mb) for mb in unused),
        "beyond_mb": statistics.mean(max(0.0, -mb) for mb in unused),
    }


def replanning(made: Training, sites: int) -> dict[str, float]:
    """Plans for so many sites, each under a budget that was never met before."""
    planner, tracker = made.daf._session.planner, made.daf._session.compressor.tracker
    batch, own = made.daf._session.last_plan.batch, dict(tracker.sites)
    able = [site for site in own.values() if site.candidates]
    for number in range(max(0, sites - len(own))):
        site = able[number % len(able)]
        importance = site.importance * (1 + number % 17)
        tracker.sites["copy", number] = replace(site, name=f"copy/{number}", importance=importance)
    planner.forget()
    choices = planner.choices("key", batch)
    times = []
    for number in range(1, 101):
        limit = choices.least_bytes + (choices.exact_bytes - choices.least_bytes) * number / 200
        made.daf._session.compressor.set_limit(limit)
        began = perf_counter()
        planner.plan("key", batch)
        times.append((perf_counter() - began) * 1e3)
    tracker.sites = own
    planner.forget()
    made.daf.set_budget(1e6)
    return {
        "sites": max(sites, len(own)),
        "median_milliseconds": statistics.median(times),
        "slowest_milliseconds": max(times),
    }


def draw(trace: list[dict[str, float]], path: str) -> None:
    """Budget, held bytes and mean bits along one iteration."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.step(range(len(trace)), [row["budget_mb"] for row in trace], label="budget", where="post")
    axes.plot([row["held_mb"] for row in trace], label="held", marker=".")
    axes.axvline(sum(row["forward"] for row in trace) - 0.5, color="grey", linestyle=":")
    axes.set_xlabel("layers: forward pass, then backward pass")
    axes.set_ylabel("MB")
    bits = axes.twinx()
    bits.plot([row["mean_bits"] for row in trace], color="tab:green", label="mean bits")
    bits.set_ylabel("mean bits of what is held")
    figure.legend(loc="outside upper right", ncols=3, fontsize="small")
    figure.savefig(path)


def table(title: str, rows: list[dict[str, float]], below: str) -> str:
    cells = [[f"{value:.4g}" for value in row.values()] for row in rows]
    return render_table(title, tuple(rows[0]), cells, len(rows[0]), below)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--high", type=float, default=300, help="budget, MB")
    parser.add_argument("--low", type=float, default=100, help="budget to fall to, MB")
    parser.add_argument("--step_mb", type=float, nargs="*", default=[10, 50, 100, 200])
    parser.add_argument("--sites", type=int, default=500)
    parser.add_argument("--plot", metavar="FILE", help="draw one iteration there")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    tune_malloc()
    found: dict[str, Any] = {"arena": arena_alone(options)}
    print(table("an arena alone", [found["arena"]], ""))
    made = training(options)
    found["fall"] = fall(made, options)
    size = f"{options.layers} layers of {options.hidden}, {options.batch} x {options.tokens} tokens"
    cells = [(name, f"{value:.4g}") for name, value in found["fall"].items()]
    title = f"a fall from {options.high:g} to {options.low:g} MB in mid-forward"
    print(render_table(title, ("figure", "value"), cells, 1, size))
    found["trace"], _ = iteration(made, options, 0)
    if options.plot:
        draw(found["trace"], options.plot)
    found["steps"] = [iteration(made, options, step)[1] for step in options.step_mb]
    if found["steps"]:
        print(table("one iteration under a falling and rising budget", found["steps"], size))
    found["replanning"] = replanning(made, options.sites)
    print(table("a new plan", [found["replanning"]], ""))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
