"""``python -m daf_hf.env``: which kernels serve on this machine, and why.

With ``--json`` the same as :func:`report` gives. The exit status is 1 where a self-check failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib import metadata
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import host_memory
from ._version import __version__
from .kernels import CANDIDATES, cpu_status, get_backend
from .kernels.cuda_driver import CudaError, Driver
from .kernels.nvrtc import compilers
from .self_check import self_check

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "triton", "liger-kernel")
_PASSED = "passed"


def report() -> dict[str, Any]:
    """What there is, what is in use, and why.

    Returns:
        ``"packages"``: versions by name, None where not installed. ``"system"``: Python, platform,
        C library and malloc. ``"native"``: the native CPU library. ``"gpu"``: torch's CUDA,
        devices, driver and NVRTC. ``"backends"``: for ``"cpu"`` and ``"cuda"`` the ``"active"``
        backend (None without such a device), and all that could serve by name, each with
        ``"available"``, ``"reason"`` (why not) and ``"self_check"`` (``"passed"``, or what is
        wrong; None where not available). All of it can be written as JSON.
    """
    return {
        "packages": {"daf_hf": __version__, **{name: _version(name) for name in _PACKAGES}},
        "system": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processor": platform.machine(),
            "libc": " ".join(platform.libc_ver()).strip() or "not glibc",
            "allocator": host_memory.allocator(),
        },
        "native": _native(),
        "gpu": _gpu(),
        "backends": {kind: _backends(kind) for kind in CANDIDATES},
    }


def all_passed(found: dict[str, Any]) -> bool:
    """Whether no self-check of a report failed."""
    checks = [
        backend["self_check"]
        for on in found["backends"].values()
        for backend in on["candidates"].values()
    ]
    return all(check in (_PASSED, None) for check in checks)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _native() -> dict[str, Any]:
    status = cpu_status()
    return {
        "library": str(status.path) if status.path else None,
        "compiler": status.compiler or None,
        "isa": status.isa or None,
        "isas": list(status.isas),
        "threads": status.threads,
    }


def _gpu() -> dict[str, Any]:
    try:
        driver = "CUDA " + ".".join(map(str, Driver().version))
    except (OSError, CudaError) as error:
        driver = f"none ({error})"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "torch_cuda": torch.version.cuda,
        "driver": driver,
        "devices": [
            "{} sm_{}{}".format(
                torch.cuda.get_device_name(index), *torch.cuda.get_device_capability(index)
            )
            for index in range(count)
        ],
        "nvrtc": [
            {
                "path": compiler.path,
                "version": ".".join(map(str, compiler.version)),
                "capabilities": list(compiler.capabilities),
            }
            for compiler in compilers()
        ],
    }


def _backends(kind: str) -> dict[str, Any]:
    there = kind == "cpu" or torch.cuda.is_available()
    candidates = {name: _candidate(name, kind, there) for name in (*CANDIDATES[kind], "reference")}
    active = next((name for name, found in candidates.items() if found["available"]), None)
    return {"active": active, "candidates": candidates}


def _candidate(name: str, kind: str, there: bool) -> dict[str, Any]:
    reason = "" if there else f"torch finds no {kind.upper()} device"
    try:
        backend = get_backend(name, kind)
    except RuntimeError as error:
        return {"available": False, "reason": str(error), "self_check": None}
    check = (self_check(backend, kind) or _PASSED) if there else None
    return {"available": there, "reason": reason, "self_check": check}


def _print(found: dict[str, Any], console: Console) -> None:
    versions = Table(title="daf_hf: environment", title_justify="left", show_header=False)
    versions.add_column()
    versions.add_column(overflow="fold")
    for part in ("packages", "system", "native", "gpu"):
        for name, value in found[part].items():
            versions.add_row(name.replace("_", " "), _text(value))
        versions.add_section()
    console.print(versions)
    table = Table(title="daf_hf: kernels", title_justify="left")
    for column in ("tensors on", "backend", "state", "self-check"):
        table.add_column(column, overflow="fold")
    for kind, on in found["backends"].items():
        for name, backend in on["candidates"].items():
            state = "active" if name == on["active"] else "available"
            state = state if backend["available"] else backend["reason"]
            table.add_row(kind, name, escape(state), escape(backend["self_check"] or "-"))
    console.print(table)


def _text(value: Any) -> str:
    if isinstance(value, dict):  # a compiler
        first, last = value["capabilities"][0], value["capabilities"][-1]
        return f"CUDA {value['version']}, sm_{first} to sm_{last}: {value['path']}"
    if isinstance(value, list):
        return "\n".join(_text(item) for item in value) or "none"
    return "none" if value is None else str(value)


def main(arguments: list[str] | None = None) -> int:
    """Prints the report; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m daf_hf.env", description="Which kernels serve on this machine, and why."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    found = report()
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found, Console(highlight=False))
    return 0 if all_passed(found) else 1


if __name__ == "__main__":
    sys.exit(main())
