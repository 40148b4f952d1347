"""Which launch shapes are fastest on the GPU at hand?

Times every Triton kernel alone, at each of a few launch shapes, prints the table, and with
``--write`` puts the best into a file that the environment variable DAF_HF_TRITON_LAUNCH can name:

    python benchmarks/triton_tune.py --write launch.json
    DAF_HF_TRITON_LAUNCH=launch.json python train.py
"""

from __future__ import annotations

import argparse
import time
from array import array
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from daf_hf.codecs import parse_codec
from daf_hf.kernels import get_backend
from daf_hf.kernels.format import PAGE_BYTES, PageSpace
from daf_hf.kernels.triton_backend import TritonBackend
from daf_hf.kernels.triton_host import launch
from daf_hf.kernels.triton_launch import DEFAULT_SHAPES, LaunchTable, Shape, write_table

# For each shape's name: the kernel, and the codec and columns that bring it about.
WORK = {
    "encode_groups": ("encode_units", "group+normal", 768),
    "encode_rows": ("encode_units", "token+normal", 768),
    "encode_elements": ("encode_elements", "channel+normal", 768),
    "encode_pair": ("encode_pair", "binary", 768),
    "row_statistics": ("row_statistics", "token+normal", 80),
    "column_sums": ("column_sums", "channel+normal", 768),
    "column_ranges": ("column_ranges", "channel+uniform", 768),
    "finish_columns": ("finish_columns", "channel+normal", 768),
    "gather_pairs": ("gather_pairs", "token+normal", 80),
    "decode_elements": ("decode_elements", "group+normal", 768),
    "decode_pair": ("decode_pair", "binary", 768),
}
ATOMIC_CHOICES = (0, 8, 32, 128, 512)
BITS = 4


class Stopwatch:
    """A launcher that sums the time of the kernels named ``kernels``."""

    def __init__(self, kernels: tuple[str, ...], device: torch.device) -> None:
        self.kernels = kernels
        self.device = device
        self.seconds = 0.0

    def __call__(self, kernel: Any, *rest: Any) -> None:
        if kernel.__name__ not in self.kernels:
            return launch(kernel, *rest)
        self._wait()
        start = time.perf_counter()
        launch(kernel, *rest)
        self._wait()
        self.seconds += time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(
    kernels: tuple[str, ...], codec_name: str, cols: int, table: LaunchTable, options: Any
) -> float:
    """Least time of the kernels in encoding and decoding once, after once that does not count."""
    device = torch.device(options.device)
    watch = Stopwatch(kernels, device)
    backend, codec = TritonBackend(watch, table), parse_codec(codec_name)
    rows = max(1, round(options.mb * 1e6 / (2 * cols)))
    x = torch.randn(rows * cols, device=device).to(torch.bfloat16)
    bits = 1 if codec.lossless else BITS
    x = (x > 0).to(torch.bfloat16) if codec.lossless else x
    layout = codec.layout(x.numel(), cols, bits)
    pages = layout.pages(bits)
    segment = torch.zeros(pages * PAGE_BYTES, dtype=torch.uint8, device=device)
    space = PageSpace(1 << pages.bit_length(), [segment], array("q", [segment.data_ptr()]))
    numbers, times = array("i", range(pages)), []
    for _ in range(options.repeats + 1):
        watch.seconds = 0.0
        backend.encode(x, layout, bits, numbers, space)
        backend.decode(x.clone(), layout, bits, numbers, space)
        times.append(watch.seconds)
    return min(times[1:])


def candidates(name: str) -> list[Shape]:
    """The default shape, and those with half and double its block, at several numbers of warps."""
    block = DEFAULT_SHAPES[name].block
    blocks = sorted({max(block // 2, 1), block, block * 2})
    if name.startswith(("encode_", "decode_")):
        blocks = [size for size in blocks if size <= 32]
    return [Shape(size, warps) for size in blocks for warps in (1, 2, 4, 8)]


def tune(options: argparse.Namespace) -> tuple[LaunchTable, list[tuple[str, str, float]]]:
    """The best table, and all that was measured: name, choice, seconds."""
    shapes, measured = {}, []
    for name in options.kernels:
        kernel, codec, cols = WORK[name]
        times = {
            shape: measure((kernel,), codec, cols, LaunchTable({name: shape}), options)
            for shape in candidates(name)
        }
        shapes[name] = min(times, key=times.__getitem__)
        measured += [(name, str(tuple(shape)), seconds) for shape, seconds in times.items()]
    reduction = ("column_ranges", "finish_columns")
    times = {
        above: measure(reduction, "tensor+uniform", 768, LaunchTable(shapes, above), options)
        for above in ATOMIC_CHOICES
    }
    measured += [("atomic_above", str(above), seconds) for above, seconds in times.items()]
    return LaunchTable(shapes, min(times, key=times.__getitem__)), measured


def show(best: LaunchTable, measured: list[tuple[str, str, float]], title: str) -> None:
    table = Table("kernel", "(block, warps)", "us", "best", title=title)
    chosen = {name: str(tuple(shape)) for name, shape in best.shapes.items()}
    chosen["atomic_above"] = str(best.atomic_above)
    for name, choice, seconds in measured:
        table.add_row(name, choice, f"{seconds * 1e6:.1f}", "*" if chosen[name] == choice else "")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune the Triton kernels' launch shapes.")
    parser.add_argument("--device", default="cuda", help="'cpu' where triton is interpreted")
    parser.add_argument("--mb", type=float, default=50.0, help="size of the tensor in MB")
    parser.add_argument("--repeats", type=int, default=9, help="timed calls of each")
    parser.add_argument("--kernels", nargs="+", default=list(WORK), choices=WORK)
    parser.add_argument("--write", type=Path, help="file of tables to put the best into")
    options = parser.parse_args()
    get_backend("triton", options.device)  # or say why it cannot serve
    on_gpu = torch.device(options.device).type == "cuda"
    major, minor = torch.cuda.get_device_capability(options.device) if on_gpu else (0, 0)
    best, measured = tune(options)
    show(best, measured, f"compute capability {major}.{minor}, {options.mb:g} MB of bf16")
    if options.write:
        write_table(options.write, 10 * major + minor, best)


if __name__ == "__main__":
    main()
