"""Encode and decode on pages: one small file a backend.

Every backend reads and writes the format of :mod:`daf_hf.kernels.format`, and gives the results
of :mod:`daf_hf.kernels.reference` bit for bit: what one packs, another unpacks.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from . import cpu, cuda, reference, triton_loader
from .cpu import CpuStatus
from .format import Layout, PageSpace

__all__ = ["BACKENDS", "CANDIDATES", "Backend", "CpuStatus", "cpu_status", "get_backend"]

BACKENDS = ("auto", "reference", "cpu", "triton", "cuda")
"""Names that :func:`get_backend` takes."""

CANDIDATES = {"cpu": ("cpu",), "cuda": ("triton", "cuda")}
"""What ``"auto"`` tries on each type of device, best first; the reference is the last resort."""

_logger = logging.getLogger(__name__)


class Backend(Protocol):
    """Encode and decode; :mod:`daf_hf.kernels.reference` documents both."""

    @property
    def name(self) -> str: ...

    def encode(
        self, x: Tensor, layout: Layout, bits: int, table: array, space: PageSpace
    ) -> bool: ...

    def decode(
        self, out: Tensor, layout: Layout, bits: int, table: array, space: PageSpace
    ) -> None: ...


def get_backend(name: str = "auto", device: torch.device | str = "cpu") -> Backend:
    """The backend ``name`` for tensors on ``device``.

    Args:
        name: ``"reference"`` (plain torch, any device), ``"cpu"`` (native code), ``"triton"``
            (NVIDIA GPUs; with ``TRITON_INTERPRET=1`` the CPU), ``"cuda"`` (NVIDIA GPUs) or
            ``"auto"``, the fastest that works; where that is the reference though the device has
            a better one, this is logged once.
        device: where the tensors are.

    Raises:
        ValueError: ``name`` is unknown, or the environment variable ``DAF_HF_ISA`` names an
            instruction set that is unknown or not available (raised for ``"auto"`` too).
        RuntimeError: a backend was asked for by name and cannot serve; the message says why.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: use one of {BACKENDS}")
    device = torch.device(device)
    if name == "auto":
        return _best(device)
    return reference if name == "reference" else _LOADERS[name](device)


def cpu_status() -> CpuStatus:
    """What serves as the native CPU backend, or why nothing does."""
    return cpu.status()


def _load_cpu(device: torch.device) -> Backend:
    if device.type != "cpu":
        raise RuntimeError(f"the backend 'cpu' cannot serve {device}: use 'auto'")
    return cpu.load()


_LOADERS: dict[str, Callable[[torch.device], Backend]] = {
    "cpu": _load_cpu,
    "triton": triton_loader.load,
    "cuda": cuda.load,
}
"""A backend for a device, or a RuntimeError that says why not."""


@cache
def _best(device: torch.device) -> Backend:
    reasons = []
    for name in CANDIDATES.get(device.type, ()):
        try:
            return _LOADERS[name](device)
        except RuntimeError as error:
            reasons.append(str(error))
    if reasons:
        _logger.warning("%s; using 'reference', which is slow", "; ".join(reasons))
    return reference
