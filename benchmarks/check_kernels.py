"""Sections of gpu_check.py about kernels: what there is, whether it is right, how fast it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pages import Encoded, sample
from timing import device_clock, medians
from torch import Tensor

from daf_hf import env
from daf_hf.codecs import Codec, parse_codec
from daf_hf.kernels import Backend, get_backend
from daf_hf.kernels.format import Granularity
from daf_hf.self_check import self_check

Row = dict[str, Any]
"""A line of a section's table. One with ``"failed"``, which says what is wrong, fails it."""

CODECS = [Codec(unit, book) for unit in Granularity for book in ("uniform", "normal", "root")]
CODECS += [parse_codec("gelu"), parse_codec("binary")]
FAST_CODECS = ("group+uniform", "group+normal", "token+normal", "channel+normal", "gelu", "binary")
FAST_CHOICES = {torch.float32: (1, 2, 4, 8), torch.bfloat16: (4,)}
CHOICES = ((1, torch.float32), (3, torch.bfloat16), (4, torch.float16), (8, torch.float32))
SHAPES = ((129, 256), (70, 384), (31, 33), (3, 9001), (1, 1))
Case = tuple[int, torch.dtype, tuple[int, int], str]
"""Bits, dtype, rows and columns, kind of values."""

KINDS = ("normal", "tails", "tiny", "constant", "not finite")


@dataclass(frozen=True)
class Machine:
    """Where a section runs, and how much it does.

    Attributes:
        device: of the tensors.
        tiny: sizes that a CPU is done with at once.
    """

    device: torch.device
    tiny: bool


def environment(machine: Machine, argument: str) -> Iterator[Row]:
    """Versions, the device, and which kernels could serve."""
    found = env.report()
    for part in ("packages", "system", "native", "gpu"):
        for name, value in found[part].items():
            yield {"what": name, "found": str(value)}
    if machine.device.type == "cuda":
        properties = torch.cuda.get_device_properties(machine.device)
        yield {"what": "memory, MB", "found": str(round(properties.total_memory / 1e6))}
        yield {"what": "L2, MB", "found": str(round(properties.L2_cache_size / 1e6, 1))}
    for name, candidate in found["backends"][machine.device.type]["candidates"].items():
        yield {"what": f"backend {name}", "found": candidate["reason"] or "available"}


def conformance(machine: Machine, argument: str) -> Iterator[Row]:
    """The backend ``argument`` against the reference on the CPU, bit for bit."""
    try:
        backend = get_backend(argument, machine.device)
    except RuntimeError as error:
        yield {"backend": argument, "check": "available", "cases": 0, "result": str(error)}
        return
    start = time.perf_counter()
    problem = self_check(backend, machine.device)
    yield _checked(argument, "self-check", 1, problem, start)
    for codec, cases in cases_of():
        start, problem = time.perf_counter(), ""
        for bits, dtype, shape, kind in cases:
            x = values(codec, kind, shape, dtype)
            problem = problem or difference(backend, x, codec, bits, machine.device)
        yield _checked(argument, str(codec), len(cases), problem, start)


def cases_of() -> Iterator[tuple[Codec, list[Case]]]:
    """For each codec its cases: every width with every kind of value, at sizes that go round.

    Not all sizes with all widths: Triton compiles each anew, half a second a kernel.
    """
    for index, codec in enumerate(CODECS):
        pairs = [
            (1 if codec.lossless else bits, dtype, SHAPES[(index + turn) % len(SHAPES)])
            for turn, (bits, dtype) in enumerate(CHOICES)
        ]
        yield codec, [(*pair, kind) for pair in pairs for kind in KINDS]


def _checked(backend: str, check: str, count: int, problem: str, start: float) -> Row:
    row = {"backend": backend, "check": check, "cases": count, "result": problem or "equal"}
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row | ({"failed": f"{backend}, {check}: {problem}"} if problem else {})


def values(codec: Codec, kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A CPU tensor of a kind that kernels get wrong, if any."""
    x = sample(codec, *shape, torch.float32)
    if codec.lossless:
        x = x if kind != "constant" else torch.ones_like(x)
        return x.to(dtype)
    if kind == "tails":
        uniform = torch.rand(shape, generator=torch.Generator().manual_seed(1))
        x = x / uniform.clamp_min(1e-3)
    elif kind == "tiny":
        x = x * (1e-41 if dtype is torch.float32 else 1e-6)
    elif kind == "constant":
        x = torch.full_like(x, 0.1)
    elif kind == "not finite":
        x.view(-1)[x.numel() // 2] = float("nan")
    return x.to(dtype)


def difference(backend: Backend, x: Tensor, codec: Codec, bits: int, device: torch.device) -> str:
    """What ``backend`` makes of ``x`` otherwise than the reference; empty where nothing."""
    one = Encoded(get_backend("reference"), x, codec, bits, scattered=True)
    expected = one.encode()
    what = f"{bits} bits, {x.dtype}, {tuple(x.shape)}"
    try:
        other = Encoded(backend, x.to(device), codec, bits, scattered=True)
        if other.encode() is not expected:
            return f"{what}: {'is refused' if expected else 'is not refused'}"
        if not expected:
            return ""
        if not torch.equal(one.pages(), other.pages()):
            return f"{what}: other pages"
        one.decode()
        other.decode()
        restored = other.restored.cpu()
    except RuntimeError as error:
        return f"{what}: {error}"
    same = torch.equal(one.restored.view(torch.uint8), restored.view(torch.uint8))
    return "" if same else f"{what}: other values"


def bandwidth(machine: Machine, argument: str) -> Iterator[Row]:
    """Encode and decode of the backend ``argument``, against a copy on the device."""
    try:
        backend = get_backend(argument, machine.device)
    except RuntimeError as error:
        yield {"backend": argument, "direction": "none", "result": str(error)}
        return
    clock, repeats = device_clock(machine.device), 2 if machine.tiny else 11
    rows = size_bytes(machine) // (4 * COLS)
    for name in FAST_CODECS:
        codec = parse_codec(name)
        for dtype, widths in FAST_CHOICES.items():
            x = sample(codec, rows, COLS, dtype, machine.device)
            copy = torch.empty_like(x)
            for bits in [1] if codec.lossless else widths:
                pages = Encoded(backend, x, codec, bits)
                seconds = medians(
                    {"copy": lambda: copy.copy_(x), "encode": pages.encode,  # noqa: B023
                     "decode": pages.decode}, repeats, clock,
                )  # fmt: skip
                rate = 2 * x.nbytes / seconds["copy"]
                for direction in ("encode", "decode"):
                    moved = pages.moved_bytes / seconds[direction]
                    yield {
                        "backend": argument,
                        "direction": direction,
                        "codec": name,
                        "bits": bits,
                        "dtype": str(dtype).removeprefix("torch."),
                        "us": round(seconds[direction] * 1e6, 1),
                        "copy_us": round(seconds["copy"] * 1e6, 1),
                        "gb_per_s": round(moved / 1e9, 1),
                        "fraction_of_copy": round(moved / rate, 3),
                    }


COLS = 3072


def size_bytes(machine: Machine) -> int:
    """Bytes of the fp32 tensor that is timed: some times the L2, if the memory allows."""
    if machine.tiny or machine.device.type == "cpu":
        return (1 << 18 if machine.tiny else 1 << 26) // COLS * COLS
    properties = torch.cuda.get_device_properties(machine.device)
    wanted = max(1 << 28, 8 * properties.L2_cache_size)
    return min(wanted, properties.total_memory // 16) // COLS * COLS
