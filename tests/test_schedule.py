"""Budgets that are known beforehand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from daf_hf.schedule import Schedule, check_schedule


def budgets(spec, steps, of):
    schedule = Schedule(check_schedule(spec))
    return [schedule.at(step, of) for step in steps]


def test_steps_hold_from_then_on():
    assert budgets([[2, 300], [5, 100]], range(7), None) == [None, None, 300, 300, 300, 100, 100]


def test_fractions_are_of_all_steps():
    assert budgets([[0.0, 300], [0.5, 150], [0.8, 300]], (0, 4, 5, 7, 8), 10) == [
        *(300, 300, 150, 150, 300)
    ]
    # Never before that part of the training has passed.
    assert budgets([[0.5, 1]], (1, 2), 3) == [None, 1]


def test_pairs_in_any_order_and_of_both_kinds():
    assert budgets([[0.5, 150], [0, 300], [8, "inf"]], (0, 5, 8), 10) == [300, 150, math.inf]


def test_a_callable_is_told_the_step_and_all_steps(tmp_path):
    assert budgets(lambda step, steps: 100 + 10 * step / steps, (0, 5), 10) == [100, 105]
    (tmp_path / "mine.py").write_text("def half(step, steps):\n    return 1 + step // 2\n")
    assert budgets(f"{tmp_path / 'mine.py'}:half", (0, 4), None) == [1, 3]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (300, "300"),
        ({"0": 300}, "'0'"),
        ([300], "300"),
        ([[1, 2, 3]], "1, 2, 3"),
        ([[-1, 300]], "-1"),
        ([[1.5, 300]], r"1\.5"),
        ([[True, 300]], "True"),
        ([[math.nan, 300]], "nan"),
        ([["soon", 300]], "soon"),
        ([[0, 0]], "gives 0"),
        ([[0, "auto"]], "auto"),
        ("no_such_module:object", "no_such_module"),
        ("math:pi", r"3\.14"),
    ],
)
def test_what_is_no_schedule_is_named_with_what_would_do(spec, named):
    with pytest.raises(ValueError, match=rf"budget_schedule.*{named}.*: use ") as error:
        check_schedule(spec)
    assert "\n" not in str(error.value)


def test_fractions_of_nobody_knows_what():
    with pytest.raises(ValueError, match=r"fraction 0\.5 .*use step numbers"):
        budgets([[0.5, 300]], [0], None)


def test_a_callable_must_give_a_budget():
    with pytest.raises(ValueError, match=r"budget_schedule gives 'much'.*positive number"):
        budgets(lambda step, steps: "much", [0], None)


def test_an_empty_schedule_says_nothing():
    assert not Schedule(check_schedule([]))
    assert Schedule(check_schedule([[0, 1]])) and Schedule(max)


def test_numpys_numbers():
    assert check_schedule([[np.int64(3), np.float32(2)], [np.float64(0.5), 1]]) == (
        (3, 2),
        (0.5, 1),
    )


def test_a_step_with_two_budgets():
    with pytest.raises(ValueError, match="the step 3 twice"):
        check_schedule([[3, 2], [3, 4]])


@pytest.mark.parametrize("call", [lambda step: 5, lambda step, steps: 1 / 0, len])
def test_a_callable_that_fails_is_named(call):
    with pytest.raises(ValueError, match=r"budget_schedule: .* raised .*Error"):
        Schedule(check_schedule(call)).at(3, 10)


def test_steps_that_never_come():
    schedule = Schedule(check_schedule([[0, 5], [1.0, 2], [100, 3], [0.5, 4], [11, 1]]))
    assert schedule.beyond(12) == [1.0, 100]
    assert schedule.beyond(None) == []
