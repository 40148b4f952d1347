"""When calibrations take place, and that they leave training its time."""

from __future__ import annotations

import pytest

from daf_hf import DAFConfig
from daf_hf.calibration_schedule import CalibrationSchedule


class Run:
    """A run of steps of one second each, whose calibrations take ``seconds``."""

    def __init__(self, seconds, **options):
        self.now, self.seconds, self.spent = 100.0, seconds, 0.0
        self.schedule = CalibrationSchedule(DAFConfig(**options), lambda: self.now)

    def calibrated(self, steps, changes=()):
        """At which steps there was a calibration; at those of ``changes`` new sites turn up."""
        found, changed = [], False
        for step in range(steps):
            changed |= step in changes
            if self.schedule.due(step, changed):
                self.now += self.seconds
                self.spent += self.seconds
                self.schedule.done(step, self.seconds)
                found.append(step)
                changed = False
            assert not self.schedule.due(step, changed) or step not in found  # once a step
            self.now += 1.0
        return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 20, 80]),
        ({"calibrate_at": (5, 9)}, [0, 5, 9]),
        ({"calibrate_at": ()}, []),
        ({"calibrate_at": (2,), "recalibrate_every": 40}, [0, 2, 42, 82]),
        ({"calibrate_at": (), "recalibrate_every": 50}, [0, 50]),
    ],
)
def test_calibrations_that_take_no_time_are_on_time(options, expected):
    assert Run(0.0, **options).calibrated(100) == expected


def test_steps_that_are_asked_for_are_kept_however_long_they_take():
    assert Run(50.0).calibrated(100) == [0, 20, 80]


@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize("seconds", [0.5, 3.0])
def test_those_by_themselves_keep_to_their_share(share, seconds):
    run = Run(seconds, calibrate_at=(0,), recalibrate_every=1, calibration_share=share)
    found = run.calibrated(1000)
    assert run.spent <= share * (run.now - 100.0)
    assert run.spent + seconds > share * (run.now - 100.0 - 1.0)  # and use it
    assert found[:1] == [0] and found == sorted(set(found))


def test_new_sites_are_measured_at_once():
    assert Run(2.0).calibrated(100, changes=(7, 50)) == [0, 7, 20, 50, 80]


def test_sites_that_never_end_wait_for_their_share():
    run = Run(2.0, calibrate_at=(0,))
    found = run.calibrated(1000, changes=range(1000))
    assert found[:2] == [0, 1] and found[2] > 100
    assert run.spent <= 0.05 * (run.now - 100.0)


def test_all_new_sites_are_measured_at_once_where_time_is_no_matter():
    assert Run(2.0, calibration_share=1).calibrated(60, changes=(1, 2, 30)) == [0, 1, 2, 20, 30]


def test_what_is_put_off_is_made_up_for():
    run = Run(2.0, calibrate_at=(0,), recalibrate_every=30, calibration_share=0.05)
    found = run.calibrated(200)
    assert found[0] == 0 and 30 < found[1] < 90  # not at 30, when it was due first


def test_new_sites_alone_are_measured_between_periods():
    schedule = CalibrationSchedule(
        DAFConfig(calibrate_at=(0, 20), recalibrate_every=10), lambda: 0.0
    )
    assert schedule.anew(3)
    schedule.done(3, 1.0)
    assert [schedule.anew(step) for step in (7, 20, 25, 31)] == [False, True, False, True]
