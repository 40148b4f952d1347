"""When a calibration is due."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from .config import DAFConfig


class CalibrationSchedule:
    """The steps of ``calibrate_at``, and whatever ``calibration_share`` leaves time for.

    The steps of ``calibrate_at`` are taken as they are. Any other calibration is put off while it
    would bring the time of all calibrations above that share of the time since the run began, if
    it took as long as the last one. But sites that the last calibration did not see are measured
    at once, unless it took place for such sites itself: a model whose sites change in every step
    must not calibrate in every step.

    Args:
        config: the options.
        clock: seconds since whenever.

    Attributes:
        calibrated_at: the step of the last calibration; None before the first.
        for_change: it took place for sites that the one before had not seen.
        last_seconds: how long it took.
    """

    def __init__(self, config: DAFConfig, clock: Callable[[], float] = perf_counter) -> None:
        self._config = config
        self._clock = clock
        self._began = clock()
        self._spent = self.last_seconds = 0.0
        self.for_change = False
        self.calibrated_at: int | None = None

    def due(self, step: int, changed: bool) -> bool:
        """Whether to calibrate before this step; ``changed``: there are sites not known yet."""
        config = self._config
        if self.calibrated_at is None:
            return bool(config.calibrate_at or config.recalibrate_every)
        if self.calibrated_at == step:
            return False
        if step in config.calibrate_at or (changed and not self.for_change):
            return True
        return (changed or self._is_period_over(step)) and self._has_time()

    def anew(self, step: int) -> bool:
        """Whether a calibration before this step measures what is known, too."""
        first = self.calibrated_at is None
        return first or step in self._config.calibrate_at or self._is_period_over(step)

    def done(self, step: int, seconds: float) -> None:
        """A calibration took place, and took so long."""
        self.for_change = not self.anew(step)
        self.calibrated_at = step
        self._spent += seconds
        self.last_seconds = seconds

    def _is_period_over(self, step: int) -> bool:
        """Whether a period of ``recalibrate_every`` has ended since the last calibration."""
        every, last = self._config.recalibrate_every, max(self._config.calibrate_at, default=0)
        since = max(last, self.calibrated_at or 0)
        return every > 0 and (step - last) // every > (since - last) // every

    def _has_time(self) -> bool:
        elapsed = self._clock() - self._began
        share = self._config.calibration_share
        return self._spent + self.last_seconds <= share * (elapsed + self.last_seconds)
