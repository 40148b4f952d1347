"""The native CPU backend: ``native/library.cpp``, loaded with ctypes.

Same contract and, bit for bit, same results as :mod:`daf_hf.kernels.reference`, whatever the
instruction set and the number of threads. The library is built when the package is installed;
:func:`load` says why where it cannot be used.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from array import array
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from .fit import check_encodable, check_fit
from .format import MAX_BITS, Codebook, Layout, PageSpace

ISA_VARIABLE = "DAF_HF_ISA"
"""Environment variable that forces an instruction set, one of ``ISAS``."""

ISAS = ("avx512vbmi", "avx512", "avx2", "neon", "baseline")
"""``baseline`` is SSE2 on x86-64; AArch64 has ``neon`` alone."""

PARALLEL_BYTES = 1 << 20
"""Tensors smaller than this are handled by the calling thread alone."""

_FOLDER = Path(__file__).parent
_NAME = "_native"
_ABI_VERSION = 3
_DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.uint8: 3,
    torch.bool: 4,
}
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_CPU = torch.device("cpu")


class _Codebook(ctypes.Structure):
    _fields_ = [
        ("statistics", ctypes.c_int32),
        ("grid_origin", ctypes.c_float),
        ("grid_density", ctypes.c_float),
        ("cells", ctypes.c_int32),
        ("lut", ctypes.c_void_p),
        ("tables", ctypes.c_void_p * (MAX_BITS + 1)),
    ]


class _Layout(ctypes.Structure):
    _fields_ = [
        ("numel", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("plane_pages", ctypes.c_int64),
        ("units", ctypes.c_int64),
        ("statistics_pages", ctypes.c_int64),
        ("granularity", ctypes.c_int32),
        ("wide", ctypes.c_int32),
        ("book", ctypes.c_void_p),
    ]


class _Mersenne(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint32 * 624), ("next", ctypes.c_int32)]


@dataclass(frozen=True)
class CpuStatus:
    """What serves as the native CPU backend.

    Attributes:
        available: whether it can be used.
        reason: why not; empty when it can.
        path: the shared library; None when there is none.
        isa: instruction set in use, one of ``ISAS``; empty when not available.
        isas: those that this processor has, best first.
        compiler: what built the library; empty when not available.
        threads: most threads that a call uses: ``torch.get_num_threads()``.
    """

    available: bool
    reason: str
    path: Path | None
    isa: str
    isas: tuple[str, ...]
    compiler: str
    threads: int


class CpuBackend:
    """``encode`` and ``decode`` in native code. Made by :func:`load`."""

    name = "cpu"

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        self.path = path
        self._library = library
        pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        for function in (library.daf_encode, library.daf_decode):
            function.argtypes = [pointer, number, number, pointer, pointer, pointer, long, number]
        library.daf_isa.restype = library.daf_compiler.restype = ctypes.c_char_p
        library.daf_has_isa.argtypes = [ctypes.c_char_p]
        library.daf_use_isa.argtypes = [ctypes.c_char_p]
        library.daf_book_create.argtypes = [pointer]
        library.daf_book_create.restype = pointer
        library.daf_book_destroy.argtypes = [pointer]
        library.daf_book_destroy.restype = None
        library.daf_noise_begin.argtypes = [pointer, pointer]
        library.daf_noise.argtypes = [
            pointer,
            long,
            ctypes.c_uint64,
            number,
            ctypes.c_uint32,
            pointer,
        ]
        library.daf_noise.restype = None
        self._encode, self._decode = library.daf_encode, library.daf_decode
        self._books: weakref.WeakKeyDictionary[Codebook, int] = weakref.WeakKeyDictionary()
        self._layouts: weakref.WeakKeyDictionary[Layout, tuple[_Layout, int]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._library.daf_isa().decode()

    @property
    def isas(self) -> tuple[str, ...]:
        """Those of ``ISAS`` that this processor has."""
        return tuple(isa for isa in ISAS if self._library.daf_has_isa(isa.encode()))

    @property
    def compiler(self) -> str:
        """What the library was built with, such as ``"GCC 12.2.0"``."""
        return self._library.daf_compiler().decode()

    def use_isa(self, isa: str) -> None:
        """Use ``isa``, one of ``ISAS``, from now on. It changes the speed only.

        Raises:
            RuntimeError: this processor lacks it.
        """
        if not self._library.daf_use_isa(isa.encode()):
            message = f"instruction set {isa!r} is not available here: use one of {self.isas}"
            raise RuntimeError(message)

    def encode(self, x: Tensor, layout: Layout, bits: int, table: array, space: PageSpace) -> bool:
        """As :func:`daf_hf.kernels.reference.encode`.

        Raises:
            ValueError: ``x``, ``bits`` or ``table`` does not fit ``layout``.
        """
        address, dtype, threads = self._check(x, layout, bits, table)
        check_encodable(x, layout, bits)
        result = self._encode(
            address,
            bits,
            dtype,
            x.data_ptr(),
            table.buffer_info()[0],
            space.pointers.buffer_info()[0],
            space.pages_per_segment,
            threads,
        )
        if result < 0:
            raise MemoryError("no memory for the statistics of the columns")
        return result == 1

    def decode(
        self, out: Tensor, layout: Layout, bits: int, table: array, space: PageSpace
    ) -> None:
        """As :func:`daf_hf.kernels.reference.decode`.

        Raises:
            ValueError: ``out``, ``bits`` or ``table`` does not fit ``layout``.
        """
        address, dtype, threads = self._check(out, layout, bits, table)
        result = self._decode(
            address,
            bits,
            dtype,
            out.data_ptr(),
            table.buffer_info()[0],
            space.pointers.buffer_info()[0],
            space.pages_per_segment,
            threads,
        )
        if result < 0:
            raise MemoryError("no memory for the statistics of the columns")

    def noise(self, state: Tensor, keep: float) -> NativeStream:
        """Dropout's noise from a state of torch's CPU generator; see :mod:`daf_hf.kernels.noise`.

        Args:
            state: ``uint8 [5056]``; not changed.
            keep: the probability that an element is not 0.

        Raises:
            ValueError: the state is not that of a Mersenne Twister.
        """
        return NativeStream(self._library, state, keep)

    def _check(self, x: Tensor, layout: Layout, bits: int, table: array) -> tuple[int, int, int]:
        """Address of the layout's descriptor, dtype code, threads to use."""
        check_fit(x, layout, bits, table, _CPU)
        entry = self._layouts.get(layout)
        if entry is None:
            # Another thread may be using the one that it made: there is never a second.
            entry = self._layouts.setdefault(layout, self._describe(layout))
        threads = torch.get_num_threads() if x.nbytes >= PARALLEL_BYTES else 1
        return entry[1], _DTYPES[x.dtype], threads

    def _describe(self, layout: Layout) -> tuple[_Layout, int]:
        """The layout's descriptor and its address."""
        descriptor = _Layout(
            layout.numel,
            layout.cols,
            layout.rows,
            layout.groups,
            layout.plane_pages,
            layout.units,
            layout.statistics_pages,
            layout.granularity,
            layout.wide,
            self._book(layout.codebook),
        )
        return descriptor, ctypes.addressof(descriptor)

    def _book(self, codebook: Codebook) -> int:
        """Address of the native codebook, which lives as long as ``codebook``."""
        book = self._books.get(codebook)
        if book is None:
            tables = (ctypes.c_void_p * (MAX_BITS + 1))(*(t.data_ptr() for t in codebook.tables))
            source = _Codebook(
                codebook.statistics,
                codebook.grid_origin,
                codebook.grid_density,
                codebook.cells,
                None if codebook.lut is None else codebook.lut.data_ptr(),
                tables,
            )
            book = self._library.daf_book_create(ctypes.addressof(source))
            if not book:
                raise MemoryError("no memory for a codebook")
            self._books[codebook] = book
            weakref.finalize(codebook, self._library.daf_book_destroy, book)
        return book


class NativeStream:
    """A :class:`daf_hf.kernels.noise.Stream` of the native backend. Made by it."""

    divisible = True

    def __init__(self, library: ctypes.CDLL, state: Tensor, keep: float) -> None:
        self._draw = library.daf_noise
        self._engine = _Mersenne()
        self._address = ctypes.addressof(self._engine)
        self._keep = keep
        if not library.daf_noise_begin(self._address, state.data_ptr()):
            raise ValueError("this is not the state of a Mersenne Twister")

    def fill(self, out: Tensor) -> None:
        """Fill ``out``, flat and contiguous, of fp32, bf16 or fp16, with 0 and ``1 / keep``."""
        kept = torch.ones(1, dtype=out.dtype).div_(self._keep).view(_BITS[out.dtype])
        # An element is kept where 53 random bits, as an integer, are below the threshold.
        threshold = math.ceil(self._keep * 2.0**53)
        width = out.element_size()
        self._draw(self._address, out.numel(), threshold, width, int(kept), out.data_ptr())


@cache
def load() -> CpuBackend:
    """The native backend.

    Raises:
        RuntimeError: it was not built, cannot be loaded, or is of another version of this
            package.
        ValueError: ``DAF_HF_ISA`` names an instruction set that is unknown or not available.
    """
    backend, reason = _try_load()
    if backend is None:
        raise RuntimeError(
            f"the native CPU backend is not available: {reason}. Reinstall daf-hf where there is "
            "a C++17 compiler, or use the backend 'reference'"
        )
    isa = os.environ.get(ISA_VARIABLE)
    if isa:
        try:
            backend.use_isa(isa)
        except RuntimeError:
            message = f"{ISA_VARIABLE}={isa!r}: use one of {list(backend.isas)}"
            raise ValueError(message) from None
    return backend


def status() -> CpuStatus:
    """What serves as the native CPU backend, or why nothing does."""
    threads = torch.get_num_threads()
    try:
        backend = load()
    except (RuntimeError, ValueError) as error:
        return CpuStatus(False, str(error), _library_path(), "", (), "", threads)
    return CpuStatus(True, "", backend.path, backend.isa, backend.isas, backend.compiler, threads)


def _library_path() -> Path | None:
    candidates = (_FOLDER / f"{_NAME}{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.exists()), None)


def _try_load() -> tuple[CpuBackend | None, str]:
    """The backend, or the reason why there is none."""
    path = _library_path()
    if path is None:
        return None, f"it was not built (no {_NAME}{EXTENSION_SUFFIXES[0]} in {_FOLDER})"
    try:
        library = ctypes.CDLL(str(path))
        version = library.daf_abi_version()
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded ({error})"
    if version != _ABI_VERSION:
        return None, f"{path} has ABI version {version}, this package needs {_ABI_VERSION}"
    return CpuBackend(library, path), ""
