"""How fast are encode and decode, next to a memcpy of the same tensor?

Prints one table: for every backend, direction, codec, width, dtype and number of threads the
median time, and the bytes read and written per second as a fraction of what memcpy reaches in
the same run.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --mb 50 --bits 1 2 4 8 --codec group+normal --json kernels.json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from daf_hf.codecs import Codec, parse_codec
from daf_hf.kernels import Backend, cpu_status, get_backend
from daf_hf.kernels.format import PAGE_BYTES, PageSpace

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COLS = 768


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of ``call`` after one call that does not count."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def sample(codec: Codec, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the kind that ``codec`` is made for."""
    x = torch.randn(rows, COLS, generator=torch.Generator().manual_seed(0))
    if codec.lossless:
        x = (x > -1.28).float() / 0.9
    elif codec.codebook == "root":
        x = x.softmax(-1)
    return x.to(dtype)


def memcpy_throughput(x: torch.Tensor, repeats: int) -> float:
    """Bytes that one thread's memcpy of ``x`` reads and writes in a second."""
    copy = torch.zeros_like(x)
    seconds = median_seconds(
        lambda: ctypes.memmove(copy.data_ptr(), x.data_ptr(), x.nbytes), repeats
    )
    return 2 * x.nbytes / seconds


def measure(
    backend: Backend, codec: Codec, bits: int, x: torch.Tensor, repeats: int
) -> dict[str, tuple[float, int]]:
    """For each direction the median seconds, and the bytes that it reads and writes."""
    layout = codec.layout(x.numel(), COLS, bits)
    pages = layout.pages(bits)
    segment = torch.zeros(max(pages, 1) * PAGE_BYTES, dtype=torch.uint8)
    space = PageSpace(1 << pages.bit_length(), [segment], array("q", [segment.data_ptr()]))
    table, flat, out = array("i", range(pages)), x.flatten(), torch.zeros(x.numel(), dtype=x.dtype)
    moved = x.nbytes + pages * PAGE_BYTES
    encode = median_seconds(lambda: backend.encode(flat, layout, bits, table, space), repeats)
    decode = median_seconds(lambda: backend.decode(out, layout, bits, table, space), repeats)
    return {"encode": (encode, moved), "decode": (decode, moved)}


def run(options: argparse.Namespace) -> list[dict]:
    """One row for each combination."""
    rows = []
    for name in options.dtype:
        dtype = DTYPES[name]
        count = max(1, round(options.mb * 1e6 / (COLS * dtype.itemsize)))
        memcpy = memcpy_throughput(torch.ones(count, COLS, dtype=dtype), options.repeats)
        for threads in options.threads:
            torch.set_num_threads(threads)
            for backend_name in options.backend:
                backend = get_backend(backend_name)
                for text in options.codec:
                    codec = parse_codec(text)
                    x = sample(codec, count, dtype)
                    for bits in [1] if codec.lossless else options.bits:
                        result = measure(backend, codec, bits, x, options.repeats)
                        for direction, (seconds, moved) in result.items():
                            rows.append(
                                {
                                    "backend": backend.name,
                                    "direction": direction,
                                    "codec": text,
                                    "bits": bits,
                                    "dtype": name,
                                    "threads": threads,
                                    "ms": round(seconds * 1e3, 3),
                                    "of_memcpy": round(moved / seconds / memcpy, 3),
                                }
                            )
    return rows


def show(rows: list[dict], title: str) -> None:
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="right" if column in ("bits", "ms") else "left")
    for row in sorted(rows, key=lambda row: row["direction"], reverse=True):
        table.add_row(*(str(value) for value in row.values()))
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of encode and decode next to memcpy.")
    codecs = ["group+uniform", "group+normal", "token+normal", "channel+normal", "gelu", "binary"]
    available = ["cpu"] if cpu_status().available else ["reference"]
    parser.add_argument("--mb", type=float, default=50.0, help="size of the tensor in MB")
    parser.add_argument("--backend", nargs="+", default=available, help="backends to measure")
    parser.add_argument("--codec", nargs="+", default=codecs, help="codecs by name")
    parser.add_argument("--bits", nargs="+", type=int, default=[1, 2, 4, 8], help="bit widths")
    parser.add_argument("--dtype", nargs="+", default=["fp32"], choices=DTYPES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1], help="numbers of threads")
    parser.add_argument("--repeats", type=int, default=9, help="timed calls of each")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    rows = run(options)
    show(rows, f"{options.mb:g} MB; native backend: {cpu_status().isa or 'not built'}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
