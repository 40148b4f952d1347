"""Sections of gpu_check.py about training: what hooks cost, and what a step takes and holds."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from check_kernels import Machine, Row
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from daf_hf import compress_activations
from daf_hf.accounting import ResidentPeak
from daf_hf.host_memory import tune_malloc
from daf_hf.kernels import get_backend

BUDGET_MB = 300.0
TINY_BUDGET_MB = 0.25
WARM_UP = 3
"""Steps that do not count, of which the first calibrates."""

MODES = ("plain", "daf", "checkpointing")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PeakMemory:
    """The most memory above what there was at the start: the device's, or resident memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._resident = None
        if device.type == "cuda":
            self._base = torch.cuda.memory_allocated(device)
            self.restart()
        else:
            self._resident = ResidentPeak()

    def restart(self) -> None:
        """Forget the peak so far, where that can be: not that of resident memory."""
        if self._resident is None:
            synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def bytes(self) -> int:
        if self._resident is not None:
            return self._resident.sample()
        return torch.cuda.max_memory_allocated(self._device) - self._base


class KernelTime:
    """Sums the seconds of a backend's calls, as the host sees them, from now on.

    Args:
        backend: there is one object for a device, whoever asks for it.
    """

    def __init__(self, backend: Any) -> None:
        self.seconds = 0.0
        backend.encode, backend.decode = map(self._timed, (backend.encode, backend.decode))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments)
            self.seconds += time.perf_counter() - start
            return result

        return timed


class Stack(nn.Module):
    """Linear layers and GELUs: each operation saves one tensor of its own, and weights."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.square().mean()


def hooks(machine: Machine, argument: str) -> Iterator[Row]:
    """Microseconds a saved tensor that hooks cost beyond the kernels, by the wall clock.

    ``in_hooks_us`` is of that what is spent inside pack and unpack. What pack and unpack do
    together counts: a tensor passes both.
    """
    blocks, rows, width = (3, 64, 64) if machine.tiny else (16, 256, 64)
    rounds, repeats = (1, 3) if machine.tiny else (4, 25)
    torch.set_num_threads(1)  # more would only wait for each other
    torch.manual_seed(0)
    model = Stack(blocks, width).to(machine.device)
    x = torch.randn(rows, width, device=machine.device)
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor.nbytes) or tensor, lambda t: t):
        model(x)
    budget_mb = 0.5 * blocks * 2 * rows * width * 4 / 1e6
    times = _hook_times(machine, model, x, budget_mb, rounds, repeats)
    each = {name: statistics.median(all_) * 1e6 / len(saved) for name, all_ in times.items()}
    yield {
        "saved_tensors": len(saved),
        "of_them_encoded": 2 * blocks,
        "plain_us": round(each["plain"], 2),
        "empty_hooks_us": round(each["empty"] - each["plain"], 2),
        "kernels_us": round(each["kernels"], 2),
        "in_hooks_us": round(each["hooks"], 2),
        "beyond_kernels_us": round(each["daf"] - each["plain"] - each["kernels"], 2),
    }


def _hook_times(
    machine: Machine, model: nn.Module, x: torch.Tensor, budget_mb: float, rounds: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of steps: plain, empty hooks, under a budget; of the last in kernels, in hooks."""

    def step(scope: Any) -> float:
        model.zero_grad(set_to_none=True)
        synchronize(machine.device)
        start = time.perf_counter()
        with scope:
            loss = model(x)
        loss.backward()
        synchronize(machine.device)
        return time.perf_counter() - start

    empty = saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    kernels = KernelTime(get_backend("auto", machine.device))
    daf = compress_activations(
        model, budget_mb=budget_mb, bits=[4], calibrate_at=[0], recalibrate_every=0
    )

    def inside() -> float:
        """Seconds spent in pack and unpack so far, kernels included."""
        spent = daf.report.overhead_seconds
        return spent["hooks"] + spent["kernels"]

    names = "plain", "empty", "daf", "kernels", "hooks"
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, scope in (("plain", contextlib.nullcontext()), ("empty", empty)):
            times[name] += [step(scope) for _ in range(repeats + WARM_UP)][WARM_UP:]
        with daf:
            for index in range(repeats + WARM_UP):
                before, kernels.seconds = inside(), 0.0
                seconds = step(contextlib.nullcontext())
                found = seconds, kernels.seconds, inside() - before - kernels.seconds
                if index >= WARM_UP:
                    for name, value in zip(("daf", "kernels", "hooks"), found, strict=True):
                        times[name].append(value)
                daf.step()
    return times


def lora_model(machine: Machine) -> nn.Module:
    """roberta-base from its configuration, random weights, LoRA r=8 on query and value."""
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import RobertaConfig, RobertaForSequenceClassification

    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
             "intermediate_size": 128, "vocab_size": 500}  # fmt: skip
    config = RobertaConfig(max_position_embeddings=514, **(small if machine.tiny else {}))
    torch.manual_seed(0)
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, lora_dropout=0.1,
        target_modules=["query", "value"],
    )  # fmt: skip
    return get_peft_model(RobertaForSequenceClassification(config), lora).to(machine.device).train()


def training_step(machine: Machine, argument: str) -> Iterator[Row]:
    """A LoRA training step: plain, under a budget, with gradient checkpointing."""
    # transformers' own use of a name that it has deprecated.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    tune_malloc()  # for all modes, so that resident memory compares
    examples, tokens = (8, 16) if machine.tiny else (32, 128)
    for mode in MODES:
        try:
            yield one_mode(machine, mode, examples, tokens)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            yield {"mode": mode, "failed": f"{mode}: {reason}"}
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()


def one_mode(machine: Machine, mode: str, examples: int, tokens: int) -> Row:
    model: Any = lora_model(machine)
    if mode == "checkpointing":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 500, (examples, tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": torch.arange(examples) % 2}
    batch = {name: value.to(machine.device) for name, value in batch.items()}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
    budget_mb = TINY_BUDGET_MB if machine.tiny else BUDGET_MB
    scope: Any = contextlib.nullcontext()
    if mode == "daf":
        scope = compress_activations(model, budget_mb=budget_mb)

    def step() -> float:
        synchronize(machine.device)
        start = time.perf_counter()
        with scope:
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(machine.device)
        seconds = time.perf_counter() - start
        if mode == "daf":
            scope.step()
        if not bool(loss.isfinite()):
            raise ArithmeticError(f"the loss is {float(loss)}")
        return seconds

    memory = PeakMemory(machine.device)
    first = [step() for _ in range(2)]  # compiles, allocates, calibrates
    first_bytes = memory.bytes()
    memory.restart()
    row: Row = {"mode": mode, "first_ms": round(first[0] * 1e3, 1)}
    times = [step() for _ in range(3 if machine.tiny else 12)]
    row["step_ms"] = round(statistics.median(times) * 1e3, 2)
    row["first_mb"] = round(first_bytes / 1e6, 1)
    row["peak_mb"] = round(memory.bytes() / 1e6, 1)
    if mode == "daf":
        row |= held(scope, budget_mb)
    return row


def held(scope: compress_activations, budget_mb: float) -> Row:
    """What DAF reports; a budget that was not kept fails."""
    report = scope.report
    row = {
        "plain_mb": round(report.plain_bytes / 1e6, 1),
        "held_mb": round(report.held_bytes_peak / 1e6, 1),
        "error": f"{report.predicted_gradient_error:.2g}",
    }
    if report.held_bytes_peak > budget_mb * 1e6:
        row["failed"] = f"daf: held {row['held_mb']} MB of a budget of {budget_mb:g} MB"
    return row
