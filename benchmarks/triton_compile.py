"""What do the Triton kernels compile to: registers, shared memory, spills? Needs no GPU.

Runs the backend with a launcher that takes notes instead of launching, compiles what would have
been launched, with its launch shapes, for each target, and prints one table. Exits with 1 if a
kernel spills, or if its code holds arithmetic that the format forbids: fused, approximate or
flushing denormals.

    python benchmarks/triton_compile.py
    python benchmarks/triton_compile.py --quick --targets 75 90 --json triton.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from array import array
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from daf_hf.codecs import Codec, parse_codec
from daf_hf.kernels import triton_decode, triton_encode, triton_statistics
from daf_hf.kernels.format import PAGE_BYTES, PageSpace
from daf_hf.kernels.triton_backend import TritonBackend
from daf_hf.kernels.triton_host import compile_options
from daf_hf.kernels.triton_launch import Shape, launch_table

TARGETS = (75, 80, 87, 90, 120)
UNITS = ("group", "token", "channel", "tensor")
BOOKS = ("uniform", "normal", "root")
CODECS = [*(f"{unit}+{book}" for unit in UNITS for book in BOOKS), "gelu", "binary"]
QUICK_CODECS = [*(f"{unit}+normal" for unit in UNITS), "tensor+uniform", "gelu", "binary"]
QUICK_CHOICES = [(8, torch.bfloat16)]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CHOICES = [(bits, dtype) for bits in (1, 2, 4, 8) for dtype in FLOATS]
PAIR_CHOICES = [(1, dtype) for dtype in (*FLOATS, torch.uint8, torch.bool)]
SHAPES = [(20_000, 768), (20_000, 80)]  # rows of whole groups, and others
ODD_SHAPES = [(1, 1), (33, 33)]  # numbers that are 1, or not divisible by 16
FORBIDDEN = re.compile(r"\b(?:fma\.\S+|\S+\.ftz\S*|\S+\.approx\S*|div\.full\S*)")
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_MODULES = (triton_encode, triton_statistics, triton_decode)


@dataclass(frozen=True)
class Job:
    """One kernel as it would be compiled: everything that its code depends on.

    Attributes:
        kernel: its name.
        signature: the type of each argument, ``constexpr`` for constants.
        constants: the constants' values by name.
        aligned: numbers of the arguments that are divisible by 16.
        warps: warps of a program.
    """

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    warps: int


@dataclass(frozen=True)
class Result:
    """What a job compiled to, for the target ``sm``."""

    sm: int
    kernel: str
    constants: str
    warps: int
    registers: int
    shared_bytes: int
    stack_bytes: int
    forbidden: str


def job_of(kernel: Any, arguments: tuple, constants: dict, shape: Shape) -> Job:
    """What Triton would specialise ``kernel`` on for these arguments."""
    names = kernel.arg_names
    plain = {parameter.num for parameter in kernel.params if parameter.do_not_specialize}
    signature, values, aligned = [], dict(constants), []
    for index, (name, value) in enumerate(zip(names, arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature.append((name, _POINTERS[value.dtype]))
            divisible = value.data_ptr() % 16 == 0
        elif value == 1 and index not in plain:
            signature.append((name, "constexpr"))
            values[name] = 1
            continue
        else:
            signature.append((name, "i32" if value < 1 << 31 else "i64"))
            divisible = value % 16 == 0
        if divisible and index not in plain:
            aligned.append(index)
    signature += [(name, "constexpr") for name in names[len(arguments) :]]
    return Job(
        kernel.__name__, tuple(signature), tuple(values.items()), tuple(aligned), shape.warps
    )


def jobs(sm: int, quick: bool) -> list[Job]:
    """The distinct kernels that the backend launches on the target."""
    found: dict[Job, None] = {}

    def note(kernel: Any, grid: Any, arguments: tuple, constants: dict, shape: Shape) -> None:
        found[job_of(kernel, arguments, constants, shape)] = None

    backend = TritonBackend(note, launch_table(sm))
    for codec in map(parse_codec, QUICK_CODECS if quick else CODECS):
        choices = QUICK_CHOICES if quick else CHOICES
        for bits, dtype in PAIR_CHOICES if codec.lossless else choices:
            for shape in SHAPES:
                call(backend, codec, shape, bits, dtype)
        for shape in ODD_SHAPES[:1] if quick else ODD_SHAPES:
            call(backend, codec, shape, 1, torch.float32)
    return list(found)


def call(
    backend: TritonBackend, codec: Codec, shape: tuple[int, int], bits: int, dtype: torch.dtype
) -> None:
    """Encode and decode a tensor of which nothing is read."""
    x, cols = torch.empty(shape[0] * shape[1], dtype=dtype), shape[1]
    layout = codec.layout(x.numel(), cols, bits)
    pages = layout.pages(bits)
    segment = torch.empty(pages * PAGE_BYTES, dtype=torch.uint8)
    space = PageSpace(1 << pages.bit_length(), [segment], array("q", [segment.data_ptr()]))
    table = array("i", range(pages))
    backend.encode(x, layout, bits, table, space)
    backend.decode(x, layout, bits, table, space)


def build(task: tuple[int, Job]) -> Result:
    """Compile a job for a target, and read what the code needs."""
    sm, job = task
    kernel = next(getattr(m, job.kernel) for m in _MODULES if hasattr(m, job.kernel))
    attributes = {(index,): [["tt.divisibility", 16]] for index in job.aligned}
    source = ASTSource(kernel, dict(job.signature), dict(job.constants), attributes)
    options = compile_options(Shape(0, job.warps))
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    usage = resources(compiled.asm["cubin"])
    forbidden = sorted(set(FORBIDDEN.findall(compiled.asm["ptx"])))
    return Result(
        sm,
        job.kernel,
        " ".join(f"{name}={value}" for name, value in job.constants),
        job.warps,
        usage["REG"],
        compiled.metadata.shared,
        usage["STACK"] + usage["LOCAL"],
        " ".join(forbidden),
    )


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, and the bytes of stack (where spills are) and local memory, of a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def compile_all(targets: list[int], quick: bool, processes: int) -> list[Result]:
    tasks = [(sm, job) for sm in targets for job in jobs(sm, quick)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        return list(pool.map(build, tasks, chunksize=4))


def show(results: list[Result], title: str) -> None:
    """One row for each kernel and target: the most that any of its specialisations needs."""
    table = Table(title=title)
    for column in ("kernel", "target", "variants", "warps", "registers", "shared", "spills"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for kernel, sm in dict.fromkeys(sorted((r.kernel, r.sm) for r in results)):
        same = [r for r in results if (r.kernel, r.sm) == (kernel, sm)]
        most = [
            max(getattr(r, name) for r in same)
            for name in ("warps", "registers", "shared_bytes", "stack_bytes")
        ]
        table.add_row(kernel, f"sm_{sm}", str(len(same)), *map(str, most))
    Console(width=100).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="What the Triton kernels compile to.")
    parser.add_argument("--targets", nargs="+", type=int, default=TARGETS, help="such as 80 90")
    parser.add_argument("--quick", action="store_true", help="fewer codecs, widths and dtypes")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="also write every variant to this file")
    options = parser.parse_args()
    start = time.perf_counter()
    results = compile_all(options.targets, options.quick, options.processes)
    seconds = time.perf_counter() - start
    show(results, f"triton {triton.__version__}, {len(results)} kernels in {seconds:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
    bad = [r for r in results if r.stack_bytes or r.forbidden]
    for result in bad:
        print(f"spills or forbidden arithmetic: {result}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
