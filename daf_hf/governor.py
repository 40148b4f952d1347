"""``budget_mb="auto"``: the budget follows what the device has left."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from .memory_left import Reading

INTERVAL = 0.1
"""Seconds from one look to the next."""

STEADY_SECONDS = 3.0
STEADY_STEPS = 2
"""For how long there must have been room, through how many training steps, before it is taken."""

STALLED_SHARE = 0.1
"""Of ten seconds, how much waiting for memory (PSI) is too much."""

STALLED_PAUSE = 10.0
"""Seconds until such a waiting is looked at again: the kernel averages over as many."""


@dataclass(frozen=True)
class Change:
    """A budget to move to, in bytes, and why."""

    limit_bytes: float
    cause: str


class Governor:
    """Decides on the budget from readings.

    It falls at once, by as many steps as it takes to keep the headroom free, and by one step when
    memory is contended: tasks wait for it, or a control group ran into its limit. It rises when,
    through some seconds and training steps, there was always room for a step more than it takes.

    Args:
        headroom_bytes: to keep free.
        step_bytes: the budget is a multiple of it, and at least one.
    """

    def __init__(self, headroom_bytes: float, step_bytes: float) -> None:
        self._headroom = headroom_bytes
        self._step = step_bytes
        self._events: int | None = None
        self._stalled_at = -math.inf
        self._window(0.0, 0)

    def _window(self, now: float, step: int) -> None:
        """Begin to watch for steady room."""
        self._since, self._since_step, self._least_room = now, step, math.inf

    def first(self, reading: Reading, taken_bytes: float) -> Change:
        """The budget to begin with; see :meth:`next`."""
        self._events = reading.events
        room = taken_bytes + reading.available - self._headroom
        return Change(self._fitting(room), self._cause(reading))

    def next(
        self, reading: Reading, limit_bytes: float, taken_bytes: float, now: float, step: int
    ) -> Change | None:
        """What a reading calls for; None to leave the budget as it is.

        Args:
            reading: what is left.
            limit_bytes: the budget in force.
            taken_bytes: what the arena has taken of it, which is no longer left.
            now: seconds, of any clock.
            step: training steps so far.
        """
        room = taken_bytes + reading.available - self._headroom
        fitting = self._fitting(room)
        contended = self._contended(reading, now)
        if fitting < limit_bytes:
            self._window(now, step)
            return Change(fitting, self._cause(reading))
        if contended and limit_bytes > self._step:
            self._window(now, step)
            return Change(self._fitting(limit_bytes - self._step), contended)
        if reading.stalled > STALLED_SHARE:
            self._window(now, step)
        self._least_room = min(self._least_room, room)
        steady = now - self._since >= STEADY_SECONDS and step - self._since_step >= STEADY_STEPS
        if not steady:
            return None
        grown = self._fitting(self._least_room - self._step)
        self._window(now, step)
        return Change(grown, self._cause(reading)) if grown > limit_bytes else None

    def lacks_room(self, reading: Reading, taken_bytes: float) -> bool:
        """Whether not even one step fits beside the headroom."""
        return taken_bytes + reading.available - self._headroom < self._step

    def _fitting(self, room: float) -> float:
        return max(1, math.floor(room / self._step)) * self._step

    def _contended(self, reading: Reading, now: float) -> str:
        """Why memory is contended; empty where it is not."""
        before, self._events = self._events, reading.events
        if before is not None and reading.events > before:
            return "a control group ran into its limit"
        if reading.stalled > STALLED_SHARE and now - self._stalled_at >= STALLED_PAUSE:
            self._stalled_at = now
            return f"tasks waited for memory for {reading.stalled:.0%} of the last 10 s"
        return ""

    def _cause(self, reading: Reading) -> str:
        left, headroom = reading.available / 1e6, self._headroom / 1e6
        return f"{reading.source} has {left:.0f} MB left, of which {headroom:g} are to stay free"


class Watchman:
    """A thread that looks now and then, until there is nothing to look for.

    Args:
        look: called each ``INTERVAL`` seconds; False ends the thread. Its object may go meanwhile,
            which ends the thread too.
    """

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = weakref.WeakMethod(look)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wanted = False

    def start(self) -> None:
        """Have somebody look, who ends when ``look`` says so."""
        with self._lock:
            self._wanted = True
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=_watch, args=(weakref.ref(self),), name="daf_hf-governor", daemon=True
                )
                self._thread.start()

    def look(self) -> bool:
        """Look once; False when the thread is to end."""
        self._wanted = False
        look = self._look()
        if look is not None and look():
            return True
        with self._lock:
            if self._wanted:  # somebody started it meanwhile
                return True
            self._thread = None
            return False


def _watch(watchman: weakref.ref[Watchman]) -> None:
    pause = threading.Event()
    while not pause.wait(INTERVAL):
        this = watchman()
        if this is None or not this.look():
            return
        del this
