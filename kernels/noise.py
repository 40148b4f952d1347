"""The noise of dropout on a CPU, drawn once more from the generator's state.

``torch.nn.functional.dropout`` multiplies by ``bernoulli_(1 - p) / (1 - p)``, drawn from the
default generator. Whoever kept the generator's state from before has all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .cpu import CpuBackend

STATE_BYTES = 5056
"""Size of the state of a CPU generator: ``torch.Generator.get_state()``."""

SMALLEST_WORDS = 3
"""Draws between the states at which native code is compared with torch: odd, to part pairs."""


class Stream(Protocol):
    """Noise from one state of the generator.

    Attributes:
        divisible: parts drawn one after the other are what is drawn at once.
    """

    divisible: bool

    def fill(self, out: Tensor) -> None:
        """Fill ``out``, flat, with 0 and ``1 / keep``."""
        ...


class TorchStream:
    """As torch draws it.

    Args:
        state: ``uint8 [STATE_BYTES]``; not changed.
        keep: the probability that an element is not 0.
    """

    divisible = False

    def __init__(self, state: Tensor, keep: float) -> None:
        self._generator = torch.Generator()
        self._generator.set_state(state)
        self._keep = keep

    def fill(self, out: Tensor) -> None:
        out.bernoulli_(self._keep, generator=self._generator).div_(self._keep)


def streams(backend: Any) -> Callable[[Tensor, float], Stream]:
    """The fastest source of streams that draws what torch draws.

    Args:
        backend: the native CPU backend, or another one.
    """
    if isinstance(backend, CpuBackend) and _agrees(backend):
        return backend.noise
    return TorchStream


def _agrees(backend: CpuBackend) -> bool:
    """Whether native code knows this torch's generator, and what dropout makes of it."""
    generator = torch.Generator().manual_seed(0)
    for keep in (0.9, 0.5, 0.123456):
        state = generator.get_state()
        torch.empty(SMALLEST_WORDS, dtype=torch.int32).random_(generator=generator)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            expected, drawn = torch.empty(2, 1500, dtype=dtype)
            TorchStream(state, keep).fill(expected)
            try:
                backend.noise(state, keep).fill(drawn)
            except ValueError:  # a generator of another kind
                return False
            if not torch.equal(drawn, expected):
                return False
    return True
