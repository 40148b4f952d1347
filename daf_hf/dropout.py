"""Dropout's noise: drawn once more in backward, in place of being stored.

On a CPU the noise is a function of the default generator's state before it was drawn. Nobody
tells which operation drew what from where; but the state can be noted whenever a module is called
and whenever noise is saved, and then either what follows from the last note is what is being
saved, or the noise is stored like any other tensor of two values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels.noise import STATE_BYTES, Stream
from .tensors import same_bits

SMALLEST_ELEMENTS = 8 * STATE_BYTES
"""Below this a bit an element takes less than the generator's state."""

PART_ELEMENTS = 1 << 18
"""Elements that are drawn at a time, where parts will do."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_DIGITS = 6


@dataclass(frozen=True)
class Noise:
    """``numel`` elements, each ``1 / keep`` with probability ``keep`` and else 0.

    Attributes:
        stream: what draws them from ``state``.
    """

    state: Tensor
    keep: float
    numel: int
    dtype: torch.dtype
    stream: Callable[[Tensor, float], Stream]

    def begin(self) -> Stream:
        """A stream of its elements, from the first on."""
        return self.stream(self.state, self.keep)

    def is_that_of(self, flat: Tensor) -> bool:
        """Whether these are its elements; all are compared."""
        stream = self.begin()
        size = PART_ELEMENTS if stream.divisible else self.numel
        drawn = torch.empty(min(size, self.numel), dtype=self.dtype)
        for part in flat.split(size):
            stream.fill(drawn[: len(part)])
            if not same_bits(drawn[: len(part)], part):
                return False
        return True


class Draws:
    """Knows the default generator's last state, and recognises what was drawn from it.

    Args:
        stream: what draws.
    """

    def __init__(self, stream: Callable[[Tensor, float], Stream]) -> None:
        self._stream = stream
        self._state: Tensor | None = None

    def note(self) -> None:
        """Something may be drawn from now on."""
        self._state = torch.default_generator.get_state()

    def learn(self, flat: Tensor) -> float | None:
        """The probability of being kept, if ``flat`` is noise drawn since the last note."""
        keep = _keep(flat)
        if keep is None or self._state is None:
            return None
        noise = Noise(self._state, keep, flat.numel(), flat.dtype, self._stream)
        return keep if noise.is_that_of(flat) else None

    def recognise(self, flat: Tensor, keep: float) -> Noise | None:
        """The noise that ``flat`` is, if it was drawn since the last note."""
        if self._state is None or flat.numel() < SMALLEST_ELEMENTS or flat.dtype not in _DTYPES:
            return None
        noise = Noise(self._state, keep, flat.numel(), flat.dtype, self._stream)
        return noise if noise.is_that_of(flat) else None


def _keep(flat: Tensor) -> float | None:
    """The probability by which noise of these values was divided: that of fewest digits."""
    if flat.device.type != "cpu" or flat.dtype not in _DTYPES or not flat.numel():
        return None
    value = float(flat.max())
    if not 1.0 < value < math.inf:
        return None
    for digits in range(1, _MOST_DIGITS + 1):
        dropped = round(1.0 - 1.0 / value, digits)
        keep = 1.0 - dropped
        if 0.0 < dropped < 1.0 and float(torch.ones(1, dtype=flat.dtype).div_(keep)) == value:
            return keep
    return None
