"""Whether the Triton backend can serve a device: triton is imported here, and not before."""

from __future__ import annotations

import os
from array import array
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from .device_pages import upload
from .format import PAGE_BYTES, PageSpace

if TYPE_CHECKING:
    from .triton_backend import TritonBackend

INTERPRET_VARIABLE = "TRITON_INTERPRET"
"""Triton's environment variable: ``1`` has its kernels interpreted, on the CPU."""

_LEAST_CAPABILITY = (7, 5)


@cache
def load(device: torch.device) -> TritonBackend:
    """The Triton backend, after it has launched a small kernel on ``device``.

    Raises:
        RuntimeError: it cannot serve ``device``; the message says why.
    """
    reason = _obstacle(device)
    if reason:
        raise RuntimeError(f"the backend 'triton' cannot serve {device}: {reason}")
    try:
        from .triton_backend import TritonBackend

        backend = TritonBackend()
        _launch_one(device)
    except Exception as error:  # of a compiler, a driver, an assembler: no list is complete
        raise RuntimeError(
            f"the backend 'triton' cannot serve {device}: its kernels do not run here ({error!r})"
        ) from error
    return backend


def _obstacle(device: torch.device) -> str:
    """What is missing; empty when nothing is."""
    interpret = os.environ.get(INTERPRET_VARIABLE) == "1"
    if find_spec("triton") is None:
        return "triton is not installed; install 'daf-hf[triton]'"
    if device.type == "cpu":
        return "" if interpret else f"there, {INTERPRET_VARIABLE}=1 must be set, and triton is slow"
    if device.type != "cuda" or torch.version.hip:
        return "it serves NVIDIA GPUs only"
    if interpret:
        return f"{INTERPRET_VARIABLE}=1 is set, with which it serves the CPU"
    if not torch.cuda.is_available():
        return "there is no GPU that torch can use"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"its compute capability is {capability}, and {_LEAST_CAPABILITY} is the least"
    return ""


def _launch_one(device: torch.device) -> None:
    """Read a page through its table, as every kernel does."""
    from .triton_host import launch, on_device, page_arguments
    from .triton_launch import Shape
    from .triton_statistics import gather_pairs

    with on_device(device):
        segment = torch.arange(PAGE_BYTES // 4, dtype=torch.float32, device=device)
        space = PageSpace(1, [segment.view(torch.uint8)], array("q", [segment.data_ptr()]))
        pages = upload(array("i", [0]), 1, space, device)
        pairs = torch.empty(2, dtype=torch.float32, device=device)
        arguments = (pairs, 1, *page_arguments(pages))
        launch(gather_pairs, (1,), arguments, {"WIDE": True, "BLOCK": 1}, Shape(1, 1))
        if pairs.tolist() != [0.0, 1.0]:
            raise RuntimeError(f"a kernel read {pairs.tolist()} instead of [0.0, 1.0]")
