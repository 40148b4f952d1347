"""The CUDA backend: ``cuda/kernels.cu``, compiled at run time and launched through the driver.

Same contract and, bit for bit, same results as :mod:`daf_hf.kernels.reference`. For devices that
Triton does not serve; it needs NVIDIA's driver and NVRTC, but no toolkit. :func:`load` says why
where it cannot be used.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .cuda_driver import CudaError, Device, Driver, Module
from .device_pages import DevicePages, upload
from .fit import DTYPES, check_encodable, check_fit
from .format import LANES, MAX_BITS, Codebook, Granularity, Layout, PageSpace, Statistics
from .nvrtc import compile_cached, compiler_for
from .reference import column_block_rows

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Options of the compiler: the results are the reference's only without contraction."""

THREADS = 256
"""Threads of a block."""

BLOCKS_PER_MULTIPROCESSOR = 8
"""So many blocks at most: threads then go round, and tables are staged fewer times."""

_FOLDER = Path(__file__).parent / "cuda"
_REDUCTION_BYTES = 4 * LANES  # of shared memory: a value for each warp of a block


class Job(ctypes.Structure):
    """What every kernel takes; mirrors ``Job`` in ``cuda/elements.cuh``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "data", "table", "segments", "lut", "values", "flags", "sums",
        )),
        *((name, ctypes.c_int64) for name in (
            "numel", "cols", "groups", "plane_pages", "units", "statistics_pages",
            "width", "block_rows", "blocks",
        )),
        *((name, ctypes.c_int32) for name in (
            "granularity", "statistics", "wide", "bits", "type", "shift", "mask", "cells",
        )),
        ("grid_origin", ctypes.c_float),
        ("grid_density", ctypes.c_float),
    ]  # fmt: skip


@dataclass(frozen=True)
class _Tables:
    """A codebook's tables on the device; ``values`` of all widths in a row, None where affine."""

    lut: Tensor | None
    values: Tensor | None


class CudaBackend:
    """``encode`` and ``decode`` on one CUDA device. Made by :func:`load`.

    Args:
        module: the compiled kernels, on their device.
        device: the same as torch names it.
        stream: gives the handle of the stream to launch on.
    """

    name = "cuda"

    def __init__(self, module: Module, device: torch.device, stream: Callable[[], int]) -> None:
        self.device = device
        self._module = module
        self._stream = stream
        self._tables: weakref.WeakKeyDictionary[Codebook, _Tables] = weakref.WeakKeyDictionary()

    def encode(self, x: Tensor, layout: Layout, bits: int, table: array, space: PageSpace) -> bool:
        """As :func:`daf_hf.kernels.reference.encode`. Waits for the device.

        Raises:
            ValueError: ``x``, ``bits`` or ``table`` does not fit ``layout``.
            CudaError: a kernel could not be launched.
        """
        check_fit(x, layout, bits, table, self.device)
        check_encodable(x, layout, bits)
        if not layout.numel:
            return True
        few = layout.granularity in (Granularity.CHANNEL, Granularity.TENSOR)
        count = 1 + 2 * max(layout.units, 1) if few else 3
        flags = torch.zeros(count, dtype=torch.int32, device=self.device)
        pages = upload(table, layout.pages(bits), space, self.device)
        job = self._job(x, layout, bits, pages)
        job.flags = flags.data_ptr()
        if layout.codebook.statistics is Statistics.PAIR:
            self._launch("encode_pairs", job, layout.groups * LANES, _REDUCTION_BYTES)
            self._launch("finish_pairs", job, 1)
        else:
            self._reduce(job, layout, bits)
            lut_bytes = layout.codebook.cells if job.lut else 0
            self._launch("encode_groups", job, layout.groups * LANES, lut_bytes)
        return not flags[0].item()

    def decode(
        self, out: Tensor, layout: Layout, bits: int, table: array, space: PageSpace
    ) -> None:
        """As :func:`daf_hf.kernels.reference.decode`. Does not wait for the device.

        Raises:
            ValueError: ``out``, ``bits`` or ``table`` does not fit ``layout``.
            CudaError: a kernel could not be launched.
        """
        check_fit(out, layout, bits, table, self.device)
        if not layout.numel:
            return
        pages = upload(table, layout.pages(bits), space, self.device)
        job = self._job(out, layout, bits, pages)
        table_bytes = 4 << bits if job.values else 0
        self._launch("decode_groups", job, layout.groups * LANES, table_bytes)

    # Workspaces may go before the kernels that use them have run: torch gives their memory to
    # nobody but what comes later on the same stream.

    def _reduce(self, job: Job, layout: Layout, bits: int) -> None:
        """Starts what finds the pairs of units that are not groups."""
        if not layout.units or layout.granularity is Granularity.GROUP:
            return
        if layout.granularity is Granularity.TOKEN:
            self._launch("reduce_rows", job, layout.units * LANES)
            return
        tensor = layout.granularity is Granularity.TENSOR
        job.width = LANES if tensor else layout.cols
        rows = -(-layout.numel // job.width)
        job.block_rows = column_block_rows(rows)
        job.blocks = -(-rows // job.block_rows)
        if bits == 0 or layout.codebook.statistics is Statistics.MOMENTS:
            shape = (job.blocks, 2, job.width)
            sums = torch.empty(shape, dtype=torch.float32, device=self.device)
            job.sums = sums.data_ptr()
            self._launch("sum_columns", job, job.width, rows=job.blocks)
            self._launch("finish_sums", job, job.width)
            return
        if tensor:
            self._launch("span_tensor", job, layout.numel, _REDUCTION_BYTES)
        else:
            self._launch("span_columns", job, job.width, rows=job.blocks)
        self._launch("finish_spans", job, layout.units)

    def _launch(
        self, kernel: str, job: Job, work: int, shared_bytes: int = 0, rows: int = 1
    ) -> None:
        """Starts ``kernel`` with up to ``work`` threads in each of ``rows`` rows of blocks."""
        most = BLOCKS_PER_MULTIPROCESSOR * self._module.device.multiprocessors
        grid = (min(-(-work // THREADS), most), rows)
        self._module.launch(kernel, grid, THREADS, shared_bytes, job, self._stream())

    def _job(self, x: Tensor, layout: Layout, bits: int, pages: DevicePages) -> Job:
        book, tables = layout.codebook, self._tables_of(layout.codebook)
        values = None if tables.values is None else tables.values[(1 << bits) - 1 :].data_ptr()
        return Job(
            data=x.data_ptr(),
            table=pages.table.data_ptr(),
            segments=pages.segments.data_ptr(),
            lut=None if tables.lut is None else tables.lut.data_ptr(),
            values=values,
            numel=layout.numel,
            cols=layout.cols,
            groups=layout.groups,
            plane_pages=layout.plane_pages,
            units=layout.units,
            statistics_pages=layout.statistics_pages,
            granularity=layout.granularity,
            statistics=book.statistics,
            wide=layout.wide,
            bits=bits,
            type=DTYPES.index(x.dtype),
            shift=pages.shift,
            mask=(1 << pages.shift) - 1,
            cells=book.cells,
            grid_origin=book.grid_origin,
            grid_density=book.grid_density,
        )

    def _tables_of(self, book: Codebook) -> _Tables:
        tables = self._tables.get(book)
        if tables is None:
            lut = None if book.lut is None else book.lut.to(self.device)
            values = None if _is_affine(book) else torch.cat(book.tables).to(self.device)
            tables = self._tables[book] = _Tables(lut, values)
        return tables


def _is_affine(book: Codebook) -> bool:
    """Whether every table is (code + 0.5) / 2^bits."""
    return all(
        torch.equal(book.tables[bits], (torch.arange(1 << bits, device="cpu") + 0.5) / (1 << bits))
        for bits in range(MAX_BITS + 1)
    )


def sources() -> tuple[str, dict[str, str]]:
    """The kernels' source, and what it includes by name."""
    headers = {path.name: path.read_text("utf-8") for path in sorted(_FOLDER.glob("*.cuh"))}
    return (_FOLDER / "kernels.cu").read_text("utf-8"), headers


def load(device: torch.device | str = "cuda") -> CudaBackend:
    """The CUDA backend for ``device``.

    Raises:
        RuntimeError: it cannot serve there; the message says why.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise RuntimeError(f"the backend 'cuda' cannot serve {device}: use 'auto'")
    try:
        driver = Driver()
    except (OSError, CudaError) as error:
        raise _unavailable(f"no NVIDIA driver ({error})") from error
    if torch.version.cuda is None or not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise _unavailable(f"torch {torch.__version__} ({build}) finds no CUDA device")
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        return _load(driver, index)
    except RuntimeError as error:
        raise _unavailable(str(error)) from error


def _unavailable(reason: str) -> RuntimeError:
    return RuntimeError(f"the backend 'cuda' is not available: {reason}")


_loaded: dict[int, CudaBackend] = {}


def _load(driver: Driver, index: int) -> CudaBackend:
    if index not in _loaded:
        device = Device(driver, index)
        compiler = compiler_for(device.capability, driver.version[0])
        source, headers = sources()
        image = compile_cached(compiler, source, headers, device.capability, OPTIONS)
        module = Module(driver, device, image)
        _loaded[index] = CudaBackend(
            module,
            torch.device("cuda", index),
            lambda: torch.cuda.current_stream(index).cuda_stream,
        )
    return _loaded[index]
