"""The budget of one session: what it is, who changes it, and what a change does."""

from __future__ import annotations

import logging
import math
import threading
from time import monotonic
from typing import Any

from .config import AUTO, RECOMMENDED, DAFConfig
from .control import listen
from .forks import BUDGET, free_after_fork
from .governor import Change, Governor, Watchman
from .memory_left import MemoryLeft
from .planning import Planner
from .saved_tensors import Compressor
from .schedule import Schedule
from .user_objects import text_of

logger = logging.getLogger("daf_hf")

SETTLED_SHARE = 1.02
"""Of a recommended budget, what a step may need before it is raised."""


class Budget:
    """The budget, which any thread may change at any moment.

    What is held is within a new budget when :meth:`set` returns: planes are dropped, pages moved
    together and segments given back inside. What is at its fewest bits stays until backward frees
    it. The next forward pass is planned anew.

    Args:
        config: the options.
        compressor: holds what the budget caps.
        planner: knows the least that would do.

    Attributes:
        config: the options, with the budget that was asked for last.
        installed: the session is; while it is, or anything is held, ``"auto"`` has its thread.
        running: an optimizer step was made. A budget that is too small is raised from then on.
        undecided: ``"recommended"`` was asked for, and has no number yet; until it has, the budget
            stays what it was.
        provisional: the number it has is by what a calibration knows; no step was looked at yet.
        scheduled_mb: what the schedule said last; None when it said nothing yet.
    """

    def __init__(self, config: DAFConfig, compressor: Compressor, planner: Planner) -> None:
        self.config = config
        self.installed = False
        self.running = False
        self.undecided = config.budget_mb == RECOMMENDED
        self.provisional = False
        self.scheduled_mb: float | None = None
        self._configured = config.budget_mb
        self._schedule = Schedule(config.budget_schedule)
        self._compressor = compressor
        self._planner = planner
        self._lock = free_after_fork(threading.RLock(), BUDGET)
        self._told = False
        self._asked = config.budget_bytes
        self._step = 0
        self._governor: Governor | None = None
        self._left = MemoryLeft(compressor.arena.device)
        self._watchman = Watchman(self._look)
        if config.budget_mb == AUTO:
            self._govern()

    @property
    def asked_bytes(self) -> float:
        """The budget that was asked for last, in bytes; the one in force may be larger."""
        return self._asked

    @property
    def limit_bytes(self) -> float:
        """The budget in force, in bytes."""
        return self._compressor.arena.limit_bytes

    def set(self, budget_mb: Any, cause: str) -> None:
        """Change the budget; effective before the next byte is stored.

        Args:
            budget_mb: in MB of 10^6 bytes, ``"recommended"`` or ``"auto"``. One below what the last
                plan needs at the least is raised to that, once there was a step, with one warning
                a run.
            cause: for the log.

        Raises:
            ValueError: when it is none of these.
        """
        with self._lock:
            self.config = self.config.with_budget(budget_mb)
            self._governor = None
            if self.config.budget_mb == AUTO:
                return self._govern()
            if self.config.budget_mb == RECOMMENDED:
                self.undecided = True
            else:
                self._put(self.config.budget_bytes, cause)

    def recommend(self, limit_bytes: float) -> None:
        """Put a number to ``"recommended"``, unless another budget was asked for meanwhile."""
        with self._lock:
            if self.undecided:
                self._put(limit_bytes, "recommended")
                self.provisional = True

    def settle(self, limit_bytes: float) -> bool:
        """Raise a provisional number, where a step has shown that more is needed.

        Returns:
            Whether it was raised.
        """
        with self._lock:
            raised = self.provisional and limit_bytes > SETTLED_SHARE * self.limit_bytes
            self.provisional = False
            if raised:
                self._put(limit_bytes, "recommended, by what a step holds")
        return raised

    def begin_step(self, step: int, steps: int | None) -> None:
        """Follow the schedule. A budget that was set by hand lasts until its next change.

        Raises:
            ValueError: see :meth:`daf_hf.schedule.Schedule.at`.
        """
        if not self._step and self._schedule:
            for at in self._schedule.beyond(steps):
                logger.warning(
                    "daf_hf: budget_schedule has the step %s, but this training ends with step %d",
                    at,
                    steps,
                )
        self._step += 1
        scheduled = self._schedule.at(step, steps) if self._schedule else None
        if scheduled is not None and scheduled != self.scheduled_mb:
            with self._lock:
                self.scheduled_mb = scheduled
                self._put(scheduled * 1e6, f"the schedule at step {step}")

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs, in a later process."""
        with self._lock:
            return {
                "configured_mb": self._configured,
                "budget_mb": self.config.budget_mb,
                "asked_bytes": self._asked,
                "limit_bytes": self.limit_bytes,
                "undecided": self.undecided,
                "scheduled_mb": self.scheduled_mb,
                "schedule": text_of(self.config.budget_schedule),
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with an earlier run's budget, unless another one was configured since then.

        What an earlier run's schedule said last is no budget of a run with another schedule.
        """
        with self._lock:
            scheduled = state["scheduled_mb"]
            by_schedule = scheduled is not None and state["asked_bytes"] == scheduled * 1e6
            rescheduled = state["schedule"] != text_of(self.config.budget_schedule)
            if state["configured_mb"] != self._configured or (by_schedule and rescheduled):
                return
            try:
                self.config = self.config.with_budget(state["budget_mb"])
            except ValueError as error:  # it does not go with what is configured now
                logger.warning("daf_hf: the budget of the checkpoint is not taken up: %s", error)
                return
            self.scheduled_mb = None if rescheduled else scheduled
            if self.config.budget_mb == AUTO:
                self._govern()
            else:
                self._governor = None
                asked = state["asked_bytes"]
                self._put(max(asked, state["limit_bytes"]), "the checkpoint")
                self._asked = asked
                self.undecided = state["undecided"]

    # What the device has left ------------------------------------------------------------------

    def install(self) -> None:
        """The session was installed: ``"auto"`` follows the device, other processes may ask."""
        self.installed = True
        listen(self)
        if self._governor is not None:
            self._watchman.start()

    def _govern(self) -> None:
        """Begin to follow what the device has left."""
        config = self.config
        governor = Governor(config.headroom_mb * 1e6, config.budget_step_mb * 1e6)
        reading, arena = self._left.read(), self._compressor.arena
        change = governor.first(reading, arena.taken_bytes)
        self._governor = governor
        if governor.lacks_room(reading, arena.taken_bytes):
            logger.warning(
                "daf_hf: budget_mb='auto' begins with one step of %g MB, which is not free: %s; "
                "lower headroom_mb, or end other programs",
                config.budget_step_mb,
                change.cause,
            )
        self._put(change.limit_bytes, change.cause)
        if self.installed:
            self._watchman.start()

    def _look(self) -> bool:
        """Follow the device; False when there is nothing to follow any more."""
        if self._governor is None or not (self.installed or self._compressor.arena.held_bytes):
            return False
        taken = self._compressor.arena.taken_bytes  # first: what is taken meanwhile counts twice
        reading = self._left.read()
        with self._lock:
            if self._governor is not None:
                step = self._step
                change = self._governor.next(reading, self._asked, taken, monotonic(), step)
                if change is not None:
                    self._follow(change)
        return True

    def _follow(self, change: Change) -> None:
        try:
            self._put(change.limit_bytes, change.cause)
        except (OSError, RuntimeError) as error:
            # No disk to spill to, or no memory to move pages in: the next look tries again.
            logger.warning("daf_hf: %s", error)

    def _put(self, limit: float, cause: str) -> None:
        self._asked, self.undecided, self.provisional = limit, False, False
        before, least = self.limit_bytes, self._planner.least_bytes
        if self.running and limit < least:
            self._tell(
                "daf_hf: budget_mb=%g is below the least that would do; using %g", limit, least
            )
            limit = least
        within = self._compressor.set_limit(limit)
        if not within:
            held = self._compressor.arena.held_bytes
            self._tell(
                "daf_hf: budget_mb=%g is below what is held exactly and at the fewest bits, %.2f "
                "MB; the rest follows as backward frees it, and this step's gradient suffers",
                limit,
                held,
            )
        if limit != before:
            logger.info("daf_hf: budget %s -> %s MB (%s)", _mb(before), _mb(limit), cause)

    def _tell(self, message: str, *sizes: float) -> None:
        """Warn, once a run; later on it is for the curious."""
        level = logging.INFO if self._told else logging.WARNING
        self._told = True
        logger.log(level, message, *(size / 1e6 for size in sizes))


def _mb(nbytes: float) -> str:
    return "inf" if math.isinf(nbytes) else f"{nbytes / 1e6:.6g}"
