"""Encode and decode on pages: one small file a backend.

Every backend reads and writes the format of :mod:`daf_hf.kernels.format`, and gives the results
of :mod:`daf_hf.kernels.reference` bit for bit: what one packs, another unpacks.
"""

from __future__ import annotations

import logging
from array import array
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from . import cpu, reference, triton_loader
from .cpu import CpuStatus
from .format import Layout, PageSpace

__all__ = ["BACKENDS", "Backend", "CpuStatus", "cpu_status", "get_backend"]

BACKENDS = ("auto", "reference", "cpu", "triton")
"""Names that :func:`get_backend` takes."""

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
            (NVIDIA GPUs; with ``TRITON_INTERPRET=1`` the CPU) or ``"auto"``, the fastest that
            works; where that is the reference, this is logged once.
        device: where the tensors are.

    Raises:
        ValueError: ``name`` is unknown.
        RuntimeError: ``"cpu"`` or ``"triton"`` was asked for and cannot serve; the message says
            why.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: use one of {BACKENDS}")
    device = torch.device(device)
    if name == "cpu":
        if device.type != "cpu":
            raise RuntimeError(f"the backend 'cpu' cannot serve {device}: use 'auto'")
        return cpu.load()
    if name == "triton":
        return triton_loader.load(device)
    return _best(device) if name == "auto" else reference


def cpu_status() -> CpuStatus:
    """What serves as the native CPU backend, or why nothing does."""
    return cpu.status()


@cache
def _best(device: torch.device) -> Backend:
    try:
        return cpu.load() if device.type == "cpu" else triton_loader.load(device)
    except RuntimeError as error:
        _logger.warning("%s; using 'reference', which is slow", error)
        return reference
