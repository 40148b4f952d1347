"""The support matrix."""

from __future__ import annotations

from pathlib import Path

import compatibility_matrix
from compatibility_matrix import cell, render

pytest_plugins = ["pytester"]


def test_a_cell_is_yes_only_if_all_that_ran_passed():
    assert cell([True, True]) == "yes"
    assert cell([True, False]) == "**no**"
    assert cell([True, "no GPU"]) == "yes"
    assert cell(["no GPU", "no GPU"]) == "not checked: no GPU"
    assert cell([]) == "-"


def test_rows_and_tests_are_in_the_page():
    page = render(
        {
            ("row", ("Precision", "bf16", "exact")): [True],
            ("row", ("Precision", "bf16", "flat")): ["needs a GPU"],
            ("shows", ("Distributed", "DDP", "test_ddp.py::test_weights[2]")): [True],
            ("shows", ("Distributed", "DDP", "test_ddp.py::test_plans")): [False],
        }
    )
    assert "| bf16 | yes | - | - | - | not checked: needs a GPU |" in page
    assert "| Distributed | DDP | **no** |" in page
    assert "`test_ddp.py::test_plans`<br>`test_ddp.py::test_weights`" in page


def test_the_plugin_writes_what_tests_came_to(pytester):
    pytester.syspathinsert(Path(compatibility_matrix.__file__).parent)
    pytester.makeconftest('pytest_plugins = ["compatibility_matrix"]')
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.supports("Loops", "one that works")
        def test_works():
            pass

        @pytest.mark.supports("Loops", "one that does not")
        def test_fails():
            assert False

        @pytest.mark.supports("Loops", "one that cannot be run")
        def test_skipped():
            pytest.skip("no such thing here")
        """
    )
    pytester.runpytest_inprocess("--write-matrix", "matrix.md").assert_outcomes(
        passed=1, failed=1, skipped=1
    )
    page = (pytester.path / "matrix.md").read_text(encoding="utf-8")
    assert "| Loops | one that works | yes |" in page
    assert "| Loops | one that does not | **no** |" in page
    assert "| Loops | one that cannot be run | not checked: no such thing here |" in page
