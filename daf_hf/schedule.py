"""Budgets that are known beforehand: which one holds from which step on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from .user_objects import load_object

Spec = tuple[tuple[int | float, float], ...] | str | Callable[[int, int | None], float]

_ALLOWED = (
    "use a list of [step, MB] pairs, with a step number from 0 (an integer) or a fraction of the "
    "training (a number with a point, 0.0 to 1.0) as the step; a callable (step, steps) -> MB; or "
    "its name as 'package.module:object' or 'path/to/file.py:object'"
)


def check_schedule(value: Any) -> Spec:
    """``value`` as a schedule: pairs as tuples, a callable or its name as it is.

    Raises:
        ValueError: naming the option and what is allowed.
    """
    if isinstance(value, str):
        _load(value)
        return value
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        if callable(value):
            found: Any = value
            return found
        raise ValueError(f"budget_schedule={value!r}: {_ALLOWED}")
    pairs = tuple(_pair(pair) for pair in value)
    steps = [at for at, _ in pairs]
    twice = next((at for at in steps if steps.count(at) > 1), None)
    if twice is not None:
        raise ValueError(f"budget_schedule has the step {twice!r} twice: which budget holds there?")
    return pairs


def _pair(pair: Any) -> tuple[int | float, float]:
    try:
        at, budget_mb = pair
    except (TypeError, ValueError):
        raise ValueError(f"budget_schedule has {pair!r}: {_ALLOWED}") from None
    if isinstance(at, Integral) and not isinstance(at, bool):
        at = int(at)  # NumPy's too
    elif isinstance(at, Real):
        at = float(at) if not isinstance(at, bool) else at
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not at >= 0:
        raise ValueError(f"budget_schedule has the step {at!r}: {_ALLOWED}")
    if isinstance(at, float) and at > 1:
        raise ValueError(f"budget_schedule has the fraction {at!r}: {_ALLOWED}")
    return at, checked_mb(budget_mb)


def checked_mb(value: Any) -> float:
    """A budget of a schedule in MB.

    Raises:
        ValueError: when it is not a positive number or inf.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number > 0:
        raise ValueError(
            f"budget_schedule gives {value!r}: use a positive number of MB (10^6 bytes), or inf"
        )
    return number


def _load(name: str) -> Any:
    try:
        found = load_object(name, "daf_hf.schedules")
    except Exception as error:
        message = f"budget_schedule={name!r} cannot be loaded ({error}): {_ALLOWED}"
        raise ValueError(message) from error
    if not callable(found):
        raise ValueError(f"budget_schedule={name!r} is {found!r}: {_ALLOWED}")
    return found


class Schedule:
    """The budget of each step.

    Args:
        spec: as :func:`check_schedule` returns it.
    """

    def __init__(self, spec: Spec) -> None:
        self._call = _load(spec) if isinstance(spec, str) else spec if callable(spec) else None
        self._pairs = () if isinstance(spec, str) or callable(spec) else spec

    def __bool__(self) -> bool:
        return self._call is not None or bool(self._pairs)

    def at(self, step: int, steps: int | None) -> float | None:
        """The budget in MB at a step; None before the first pair's.

        Args:
            step: optimizer steps that were made.
            steps: of the whole training, None where nobody knows.

        Raises:
            ValueError: for fractions of an unknown number of steps, or when a callable gives
                something else than a positive number.
        """
        if self._call is not None:
            try:
                found = self._call(step, steps)
            except Exception as error:
                name = getattr(self._call, "__qualname__", repr(self._call))
                raise ValueError(
                    f"budget_schedule: {name}({step}, {steps}) raised {error!r}; it is called with "
                    "the step and the number of steps, and returns MB"
                ) from error
            return checked_mb(found)
        begun = [(self._step(at, steps), budget_mb) for at, budget_mb in self._pairs]
        begun = sorted((pair for pair in begun if pair[0] <= step), key=lambda pair: pair[0])
        return begun[-1][1] if begun else None

    def beyond(self, steps: int | None) -> list[int | float]:
        """The steps of pairs that a training of so many steps never comes to."""
        if steps is None:
            return []
        return [at for at, _ in self._pairs if self._step(at, steps) >= steps]

    @staticmethod
    def _step(at: int | float, steps: int | None) -> int:
        if isinstance(at, int):
            return at
        if steps is None:
            raise ValueError(
                f"budget_schedule has the fraction {at!r} of a training whose number of steps is "
                "not known: use step numbers (integers) in a loop of your own"
            )
        return math.ceil(at * steps)
