"""The native backend on processors that QEMU emulates, for comparison with the reference.

There is no torch on the emulated side: ``qemu_driver.cpp`` serves the C ABI there, and
:class:`QemuBackend` is a backend that passes all that it is asked for to such a process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import runpy
import shlex
import shutil
import struct
import subprocess
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from unittest import mock

import torch
from torch import Tensor

from daf_hf.kernels import cpu
from daf_hf.kernels.format import Codebook, Layout, PageSpace
from daf_hf.kernels.noise import STATE_BYTES

TESTS = Path(__file__).parent
NATIVE = TESTS.parent / "kernels" / "native"

_DESCRIBE, _BOOK, _ENCODE, _DECODE, _BEGIN_NOISE, _NOISE = range(6)
_OVERRUN = -2

_BEYOND_SSE2 = "sse3 ssse3 sse4.1 sse4.2 sse4a popcnt abm bmi1 bmi2 avx"


@dataclass(frozen=True)
class Machine:
    """A processor to emulate.

    Attributes:
        name: its name among ``MACHINES``.
        compiler: command that compiles for it; ``DAF_HF_TEST_<NAME>_CXX`` may name another.
        emulator: command that runs what was compiled.
        packages: Debian's packages that have the two.
        isa: the instruction set that the native backend is to find there.
        processor: the only processor whose ``compiler`` compiles for it; "" where any does.
    """

    name: str
    compiler: str
    emulator: str
    packages: tuple[str, str]
    isa: str
    processor: str = ""

    def why_not(self) -> str:
        """Why it cannot be emulated here; empty where it can."""
        if self.processor and self.processor != platform.machine():
            return f"needs a machine of type {self.processor}"
        commands = zip((self.command()[0], self.emulator.split()[0]), self.packages, strict=True)
        missing = [(tool, package) for tool, package in commands if not shutil.which(tool)]
        if not missing:
            return ""
        tools, packages = (" and ".join(names) for names in zip(*missing, strict=True))
        return f"there is no {tools}: install {packages} (names of Debian's packages)"

    def command(self) -> list[str]:
        """The compiler's command."""
        return shlex.split(os.environ.get(f"DAF_HF_TEST_{self.name.upper()}_CXX", self.compiler))

    def build(self, folder: Path) -> list[str]:
        """Compile the driver, as setup.py compiles the library; returns the command to run it."""
        driver = folder / "driver"
        sources = [str(TESTS / "qemu_driver.cpp"), str(NATIVE / "library.cpp")]
        subprocess.run(
            [*self.command(), *compile_arguments(), "-static", f"-I{NATIVE}", *sources,
             "-o", str(driver)],
            check=True,
        )  # fmt: skip
        return [*self.emulator.split(), str(driver)]


NEON = Machine(
    "neon",
    "aarch64-linux-gnu-g++",
    "qemu-aarch64",
    ("g++-aarch64-linux-gnu", "qemu-user"),
    "neon",
)
SSE2 = Machine(
    "sse2",
    "g++",
    "qemu-x86_64 -cpu qemu64,-" + ",-".join(_BEYOND_SSE2.split()),
    ("g++", "qemu-user"),
    "baseline",
    "x86_64",
)
MACHINES = (NEON, SSE2)


def compile_arguments() -> list[str]:
    """Those of setup.py."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(TESTS.parent / "setup.py"))
    (extension,) = setup.call_args.kwargs["ext_modules"]
    return extension.extra_compile_args


class QemuBackend:
    """``encode``, ``decode`` and ``noise`` of the native backend in another process.

    Args:
        command: what runs the driver, from :meth:`Machine.build`.

    Attributes:
        threads: those that a call may use.
        isa, compiler: as of :class:`daf_hf.kernels.cpu.CpuBackend`.
    """

    name = "qemu"

    def __init__(self, command: list[str]) -> None:
        self.threads = 1
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._books: dict[Codebook, int] = {}
        sizes = self._ask(_DESCRIBE).read("4i")
        expected = (cpu._Codebook, cpu._Layout, cpu._Mersenne)
        assert sizes[:3] == tuple(ctypes.sizeof(structure) for structure in expected)
        assert sizes[3] == cpu._ABI_VERSION
        self.isa, self.compiler = self._text(), self._text()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        assert self._process.returncode == 0

    def encode(self, x: Tensor, layout: Layout, bits: int, table: array, space: PageSpace) -> bool:
        """As :func:`daf_hf.kernels.reference.encode`."""
        result = self._run(_ENCODE, x, layout, bits, table, space)
        for segment in space.segments:
            assert segment is not None
            segment.copy_(self._read_tensor(segment))
        return result == 1

    def decode(
        self, out: Tensor, layout: Layout, bits: int, table: array, space: PageSpace
    ) -> None:
        """As :func:`daf_hf.kernels.reference.decode`."""
        assert self._run(_DECODE, out, layout, bits, table, space) == 1
        out.copy_(self._read_tensor(out))

    def noise(self, state: Tensor, keep: float) -> cpu.NativeStream:
        """As :meth:`daf_hf.kernels.cpu.CpuBackend.noise`."""
        return cpu.NativeStream(cast(ctypes.CDLL, self), state, keep)

    def daf_noise_begin(self, engine: int, state: int) -> int:
        """As the function of abi.h."""
        self._ask(_BEGIN_NOISE, ctypes.string_at(state, STATE_BYTES))
        (good,) = self.read("i")
        self._read_into(engine, ctypes.sizeof(cpu._Mersenne))
        return good

    def daf_noise(
        self, engine: int, count: int, threshold: int, width: int, value: int, out: int
    ) -> None:
        """As the function of abi.h."""
        size = ctypes.sizeof(cpu._Mersenne)
        request = struct.pack("<qQiI", count, threshold, width, value & 0xFFFFFFFF)
        before = ctypes.string_at(out, count * width)
        self._ask(_NOISE, ctypes.string_at(engine, size), request, before)
        assert self.read("i") == (1,)
        self._read_into(engine, size)
        self._read_into(out, count * width)

    def read(self, format_: str) -> tuple:
        """The next values of an answer."""
        return struct.unpack("<" + format_, self._read_bytes(struct.calcsize("<" + format_)))

    def _run(
        self, request: int, x: Tensor, layout: Layout, bits: int, table: array, space: PageSpace
    ) -> int:
        descriptor = cpu._Layout(
            layout.numel,
            layout.cols,
            layout.rows,
            layout.groups,
            layout.plane_pages,
            layout.units,
            layout.statistics_pages,
            layout.granularity,
            layout.wide,
        )
        book, dtype = self._book(layout.codebook), cpu._DTYPES[x.dtype]
        counts = (book, bits, dtype, self.threads, len(table), len(space.segments))
        self._ask(
            request,
            bytes(descriptor),
            struct.pack("<6i2q", *counts, space.pages_per_segment, x.nbytes),
            table.tobytes(),
            *(_bytes_of(segment) for segment in space.segments if segment is not None),
            _bytes_of(x),
        )
        (result,) = self.read("i")
        assert result != _OVERRUN
        return result

    def _book(self, codebook: Codebook) -> int:
        if codebook not in self._books:
            lut = codebook.lut
            source = cpu._Codebook(
                codebook.statistics,
                codebook.grid_origin,
                codebook.grid_density,
                codebook.cells,
                None if lut is None else 1,
            )
            tables = [_bytes_of(table) for table in codebook.tables]
            self._ask(_BOOK, bytes(source), b"" if lut is None else _bytes_of(lut), *tables)
            self._books[codebook] = len(self._books)
        return self._books[codebook]

    def _ask(self, request: int, *parts: bytes) -> QemuBackend:
        assert self._process.stdin is not None
        self._process.stdin.write(struct.pack("<i", request) + b"".join(parts))
        self._process.stdin.flush()
        return self

    def _text(self) -> str:
        return self._read_bytes(*self.read("i")).decode()

    def _read_tensor(self, like: Tensor) -> Tensor:
        data = bytearray(self._read_bytes(like.nbytes))
        empty = torch.empty(0, dtype=torch.uint8)
        return (torch.frombuffer(data, dtype=torch.uint8) if data else empty).view(like.dtype)

    def _read_into(self, address: int, size: int) -> None:
        ctypes.memmove(address, self._read_bytes(size), size)

    def _read_bytes(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise RuntimeError(f"the driver ended with status {self._process.wait()}")
        return data


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().view(torch.uint8).numpy().tobytes()
