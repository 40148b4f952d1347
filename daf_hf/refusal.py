"""A budget that cannot be met: how much would do, and the error that says so."""

from __future__ import annotations

import math
from collections import Counter


class BudgetError(RuntimeError):
    """The budget cannot be met even with the fewest bits.

    Attributes:
        least_mb: the least ``budget_mb`` that would have done.
    """

    def __init__(self, message: str, least_mb: float) -> None:
        super().__init__(message)
        self.least_mb = least_mb

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, float]]:
        return type(self), (str(self), self.least_mb)


class Refusal:
    """Adds up, through the rest of a forward pass, the least bytes that would have been needed.

    From the first tensor that finds no room nothing more is stored; each is only counted.

    Attributes:
        inputs_exact: inputs of checkpointed regions are kept exactly in this pass.
    """

    def __init__(self) -> None:
        self.limit_bytes = math.inf
        self.least_bytes = 0
        self.floor_bits = 0
        self.inputs_exact = False
        self._started = False
        self._sites: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return self._started

    def begin(self, limit_bytes: float, held_bytes: int, floor_bits: int) -> None:
        """Start from what is held, all of it at its floor: the fewest bits that are allowed."""
        self._started = True
        self.limit_bytes = limit_bytes
        self.least_bytes = held_bytes
        self.floor_bits = floor_bits

    def add(self, site: str, nbytes: int) -> None:
        """A tensor that needs ``nbytes`` at the least."""
        self.least_bytes += nbytes
        self._sites[site] += nbytes

    def error(self) -> BudgetError:
        """The error for the user."""
        largest = ", ".join(
            f"{name} ({nbytes / 1e6:.2f} MB)" for name, nbytes in self._sites.most_common(5)
        )
        # Rounded up, so that the number named does.
        least = math.ceil(self.least_bytes / 1e4) / 100
        fewer = f"bits below {self.floor_bits} allowed (bits=...), " if self.floor_bits else ""
        fewer += "checkpoint_inputs=8, " if self.inputs_exact else ""
        return BudgetError(
            f"budget_mb={self.limit_bytes / 1e6:g} is too small for this batch even with the "
            f"fewest bits; budget_mb={least:.2f} is the least that would do. Largest at their "
            f"fewest bits among what found no room: {largest}. Ways out: a larger budget_mb, "
            f"a smaller batch or shorter sequences, {fewer}gradient checkpointing, or "
            'on_overflow="spill" with enough spill_mb.',
            least,
        )
