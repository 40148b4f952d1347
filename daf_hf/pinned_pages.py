"""Pages in pinned host memory for the elements of a CUDA device. Not run on a GPU yet."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .arena import Arena
from .codecs import GENERAL
from .kernels import Backend, get_backend
from .kernels.format import Layout, PageSpace
from .stored import Stored

logger = logging.getLogger("daf_hf")

ADDRESSING = ("triton", "cuda")
"""Backends of devices that find pages by their addresses."""

SAMPLE_ELEMENTS = 1 << 22
SAMPLE_BITS = 4
SAMPLE_ROUNDS = 4


class PinnedPages:
    """The backend between tensors on a CUDA device and pages in pinned memory.

    Kernels that find pages by address read and write pinned memory as it is: CUDA gives it one
    address for host and device. Elsewhere the host encodes and decodes, and copies.

    Args:
        backend: the device's own.
        device: where the tensors are.

    Attributes:
        host: what encodes elements that :meth:`bring` brought.
    """

    name = "pinned"

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self.host = get_backend("auto", "cpu")
        self._kernels = backend if backend.name in ADDRESSING else None
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def encode(self, x: Tensor, layout: Layout, bits: int, table: array, space: PageSpace) -> bool:
        """As :func:`daf_hf.kernels.reference.encode`."""
        if self._kernels is not None:
            return self._kernels.encode(x, layout, bits, table, space)
        return self.host.encode(x.cpu(), layout, bits, table, space)

    def decode(
        self, out: Tensor, layout: Layout, bits: int, table: array, space: PageSpace
    ) -> None:
        """As :func:`daf_hf.kernels.reference.decode`."""
        if self._kernels is not None:
            return self._kernels.decode(out, layout, bits, table, space)
        values = torch.empty(out.shape, dtype=out.dtype, device="cpu")
        self.host.decode(values, layout, bits, table, space)
        out.copy_(values)

    def bring(self, flat: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """The elements in pinned memory, and what waits until they are there.

        The copy comes after all that was launched before it. So whoever has waited for it may
        write pages that were free before: what read them on the device has done so.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        here = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        with torch.cuda.stream(self._stream):
            here.copy_(flat, non_blocking=True)
        flat.record_stream(self._stream)
        return here, self._stream.record_event().synchronize

    def synchronize(self) -> None:
        """Wait for what the device still does with pages."""
        torch.cuda.synchronize(self._device)


@cache
def host_is_faster(device: torch.device, backend: Backend) -> bool:
    """Whether a sample makes the round trip to pages and back sooner by the host's encoder.

    Measured once for each CUDA device, and logged.
    """
    sample = torch.randn(SAMPLE_ELEMENTS, device=device)
    pinned = PinnedPages(backend, device)

    def on_device(*pages: Any) -> None:
        backend.encode(sample, *pages)
        backend.decode(sample, *pages)

    def on_host(*pages: Any) -> None:
        elements, wait = pinned.bring(sample)
        wait()
        pinned.host.encode(elements, *pages)
        pinned.decode(sample, *pages)

    there = _seconds(on_device, Arena(math.inf, device), device)
    here = _seconds(on_host, Arena(math.inf, "cpu", pinned=True), device)
    integrated = getattr(torch.cuda.get_device_properties(device), "is_integrated", False)
    logger.info(
        "daf_hf: %s (%s): %.0f MB are encoded and decoded in %.2f ms, by the host in %.2f ms",
        *(device, "integrated" if integrated else "discrete", sample.nbytes / 1e6),
        *(there * 1e3, here * 1e3),
    )
    return here < there


def _seconds(round_trip: Callable[..., None], arena: Arena, device: torch.device) -> float:
    """The least of a few."""
    stored = Stored(GENERAL.layout(SAMPLE_ELEMENTS, 1, SAMPLE_BITS), SAMPLE_BITS, (), ())
    arena.insert(stored)
    times = []
    for _ in range(SAMPLE_ROUNDS):
        torch.cuda.synchronize(device)
        began = perf_counter()
        round_trip(stored.layout, stored.bits, stored.table, arena.space)
        torch.cuda.synchronize(device)
        times.append(perf_counter() - began)
    return min(times)
