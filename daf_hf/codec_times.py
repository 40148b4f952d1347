"""How long codecs take, measured with the kernels that serve."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import torch

from .codecs import Codec
from .gauge import scratch_pages

SIZES = (1 << 14, 1 << 18, 1 << 22)
"""Elements that are timed; in between times are interpolated, beyond they grow in proportion."""

COLS = 256
REPEATS = 3
SLOW_SECONDS = 0.05
"""When a size takes longer, no larger one is timed."""


class CodecTimes:
    """Seconds of encoding and restoring, by what they depend on: each is measured once.

    Args:
        backend: the kernels.
        device: where elements are.

    Attributes:
        known: sizes and times of what was measured.
    """

    def __init__(self, backend: Any, device: torch.device) -> None:
        self._backend = backend
        self._device = device
        self.known: dict[tuple[Any, ...], tuple[list[int], list[float]]] = {}

    def seconds(self, codec: Codec, bits: int, numel: int, dtype: torch.dtype) -> float:
        """Of encoding ``numel`` elements once and restoring them once."""
        book = codec.book
        key = codec.granularity, book.statistics, book.lut is None, bits, dtype
        if key not in self.known:
            self.known[key] = self._measure(codec, bits, dtype)
        sizes, times = self.known[key]
        return float(np.interp(numel, sizes, times)) * max(1.0, numel / sizes[-1])

    def _measure(
        self, codec: Codec, bits: int, dtype: torch.dtype
    ) -> tuple[list[int], list[float]]:
        sizes, times = [], []
        for numel in SIZES:
            sizes.append(numel)
            times.append(self._time(codec, bits, numel, dtype))
            if times[-1] > SLOW_SECONDS:
                break
        return sizes, times

    def _time(self, codec: Codec, bits: int, numel: int, dtype: torch.dtype) -> float:
        """The least of some repeats: other programs only add to it."""
        generator = torch.Generator().manual_seed(0)
        flat = torch.rand(numel, generator=generator).to(self._device, dtype)
        layout, out = codec.layout(numel, COLS, bits), torch.empty_like(flat)
        table, space = scratch_pages(layout, bits, self._device)
        least = float("inf")
        for _ in range(1 + REPEATS):  # the first may have to compile
            began = now(self._device)
            self._backend.encode(flat, layout, bits, table, space)
            self._backend.decode(out, layout, bits, table, space)
            least = min(least, now(self._device) - began)
        return least


def now(device: torch.device) -> float:
    """The host's clock, when the device has done what it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return perf_counter()
