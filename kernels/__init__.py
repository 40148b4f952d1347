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

from . import cpu, reference
from .cpu import CpuStatus
from .format import Layout, PageSpace

__all__ = ["BACKENDS", "Backend", "CpuStatus", "cpu_status", "get_backend"]

BACKENDS = ("auto", "reference", "cpu")
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
        name: ``"reference"`` (plain torch, any device), ``"cpu"`` (native code) or ``"auto"``,
            the fastest that works; where that is not the native code on a CPU, this is logged
            once.
        device: where the tensors are.

    Raises:
        ValueError: ``name`` is unknown, or the environment variable ``DAF_HF_ISA`` names an
            instruction set that is unknown or not available (raised for ``"auto"`` too).
        RuntimeError: ``"cpu"`` was asked for and cannot serve; the message says why.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: use one of {BACKENDS}")
    on_cpu = torch.device(device).type == "cpu"
    if name == "cpu":
        if not on_cpu:
            raise RuntimeError(f"the backend 'cpu' cannot serve {device}: use 'auto'")
        return cpu.load()
    if name == "auto" and on_cpu:
        return _best_on_cpu()
    return reference


def cpu_status() -> CpuStatus:
    """What serves as the native CPU backend, or why nothing does."""
    return cpu.status()


@cache
def _best_on_cpu() -> Backend:
    try:
        return cpu.load()
    except RuntimeError as error:
        _logger.warning("%s; using 'reference', which is slow", error)
        return reference
