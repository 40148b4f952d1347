"""NVIDIA's run-time compiler, bound with ctypes; what it compiled is kept in the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_logger = logging.getLogger(__name__)

_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so")
_ERROR_INVALID_OPTION, _ERROR_COMPILATION = 5, 6

OLDEST_OF_CUDA_13 = 75
"""CUDA 13 compiles for sm_75 and later."""


@dataclass(frozen=True)
class Compiled:
    """What a compilation gave.

    Attributes:
        image: a cubin, or PTX as text for a virtual architecture.
        log: the compiler's messages; empty where there were none.
    """

    image: bytes
    log: str


class Nvrtc:
    """One NVRTC library.

    Args:
        path: the library's path, or the name that the system's loader finds it by.

    Attributes:
        path: as given.
        handle: the loader's; the same for two names of one library.
        version: major and minor version, such as (12, 9).
        capabilities: what it compiles for, such as 75 and 90 for sm_75 and sm_90, ascending.

    Raises:
        OSError: there is no such library, or it cannot be loaded.
        RuntimeError: it is too old (before CUDA 11.2).
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        self.handle = self._library._handle
        if not hasattr(self._library, "nvrtcGetSupportedArchs"):
            raise RuntimeError(f"{path} is older than CUDA 11.2")
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        self.version = (major.value, minor.value)
        self.capabilities = tuple(found)

    def compile(
        self, source: str, headers: Mapping[str, str], arch: str, options: Sequence[str] = ()
    ) -> Compiled:
        """Compile CUDA C++.

        Args:
            source: the source text.
            headers: texts of what it includes, by name.
            arch: ``"sm_87"`` for a cubin, ``"compute_87"`` for PTX.
            options: further options of the compiler.

        Raises:
            RuntimeError: with the compiler's log, or the name of another error.
        """
        program = ctypes.c_void_p()
        texts = [text.encode() for text in headers.values()]
        names = [name.encode() for name in headers]
        flags = [f"--gpu-architecture={arch}".encode(), *(option.encode() for option in options)]
        strings = ctypes.c_char_p
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            strings(source.encode()),
            strings(b"kernels.cu"),
            len(names),
            (strings * len(names))(*texts),
            (strings * len(names))(*names),
        )
        try:
            argv = (strings * len(flags))(*flags)
            status = self._library.nvrtcCompileProgram(program, len(flags), argv)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if status in (_ERROR_INVALID_OPTION, _ERROR_COMPILATION):
                raise RuntimeError(f"NVRTC {self.version} could not compile for {arch}:\n{log}")
            self._check("nvrtcCompileProgram", status)
            image = self._read(program, "CUBIN" if arch.startswith("sm_") else "PTX")
            return Compiled(image, log)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status:
            raise RuntimeError(f"{name}: {self._library.nvrtcGetErrorString(status).decode()}")


def compilers() -> list[Nvrtc]:
    """All NVRTC libraries that can be loaded here, those from wheels first."""
    found: dict[int, Nvrtc] = {}
    for path in _candidates():
        try:
            compiler = _open(path)
        except (OSError, RuntimeError) as error:
            _logger.debug("NVRTC: %s", error)
        else:
            found.setdefault(compiler.handle, compiler)  # it may have several names
    return list(found.values())


def compiler_for(capability: int, newest: int) -> Nvrtc:
    """A compiler for sm_``capability`` whose cubins a driver of CUDA ``newest`` takes.

    Raises:
        RuntimeError: there is none; the message says what there is and what would do.
    """
    found = compilers()
    for compiler in found:
        if capability in compiler.capabilities and compiler.version[0] <= newest:
            return compiler
    if not found:
        raise RuntimeError(
            "NVRTC (libnvrtc.so) was not found: pip install 'daf-hf[cuda]', or install CUDA"
        )
    there = "; ".join(
        f"{c.path} is of CUDA {c.version[0]}.{c.version[1]}, for sm_{c.capabilities[0]} to "
        f"sm_{c.capabilities[-1]}"
        for c in found
    )
    suffix = f"-cu{min(newest, 12)}" if newest < 13 or capability < OLDEST_OF_CUDA_13 else ""
    raise RuntimeError(
        f"no NVRTC here compiles for sm_{capability} under a driver of CUDA {newest} ({there}): "
        f"pip install nvidia-cuda-nvrtc{suffix}"
    )


def compile_cached(
    compiler: Nvrtc,
    source: str,
    headers: Mapping[str, str],
    capability: int,
    options: Sequence[str] = (),
) -> bytes:
    """The cubin for sm_``capability``, from the cache where it was compiled before.

    The cache is ``daf_hf`` in ``$XDG_CACHE_HOME`` (else ``~/.cache``); where it cannot be written
    to, nothing is kept.

    Raises:
        RuntimeError: it cannot be compiled.
    """
    key = hashlib.sha256(
        repr((source, sorted(headers.items()), list(options), compiler.version)).encode()
    )
    path = cache_folder() / f"kernels-{key.hexdigest()[:24]}-sm_{capability}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        image = compiler.compile(source, headers, f"sm_{capability}", options).image
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(image)
        os.replace(file.name, path)  # so that no other process reads half of it
    except OSError as error:
        _logger.debug("the compiled kernels are not kept: %s", error)
    return image


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "daf_hf"


@cache
def _open(path: str) -> Nvrtc:
    return Nvrtc(path)


def _candidates() -> Iterator[str]:
    for package, pattern in (
        ("nvidia", "*/lib/libnvrtc.so.*"),
        ("nvidia", "*/lib/libnvrtc-*.so.*"),
        ("torch", "lib/libnvrtc[.-]*"),
    ):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(folder).glob(pattern)):
                if "builtins" not in path.name:
                    yield str(path)
    yield from _SONAMES
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield str(Path(os.environ[variable]) / "lib64" / "libnvrtc.so")
    yield "/usr/local/cuda/lib64/libnvrtc.so"
