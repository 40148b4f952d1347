"""What a plan for any budget says to people and to programs."""

from __future__ import annotations

import json
import math

import pytest

from daf_hf import BudgetPlan
from daf_hf.budget_plan import NAME_WIDTH, SITES_SHOWN, PlannedBudget, PlannedSite

NAN = math.nan
ROWS = (
    PlannedBudget(500_000, NAN, NAN, NAN, NAN, ("asked",)),
    PlannedBudget(1_000_000, 1_000_000, 100.0, 0.0, 1.234, ("least",)),
    PlannedBudget(7_500_000, 7_400_000, 13.5, 2.125, 0.25, ("recommended", "dropout")),
    PlannedBudget(100_000_000, 60_000_000, 1.67, NAN, 0.0, ("plain",)),
)


def site(number=0, name="layers.0.attention/0", bits=3):
    return PlannedSite(
        name=name,
        consumer="BmmBackward0.self SafeSoftmaxBackward0.result",
        shape=(8, 4, 16),
        dtype="float32",
        plain_bytes=2_000_000,
        planned_bytes=200_000,
        codec="group+normal",
        bits=bits,
        importance=0.125,
        price=1e6 - number,
    )


def plan(**changed):
    values = {
        "plain_bytes": 100_000_000,
        "least_bytes": 1_000_000,
        "calibration_bytes": 900_000,
        "recommended_bytes": 7_500_000,
        "error_allowed": 0.25,
        "dropout_error": 0.8,
        "budgets": ROWS,
        "sites": (site(),),
        **changed,
    }
    return BudgetPlan(**values)


def cells(text):
    """The rows below the headings, cell by cell."""
    rows = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_tables():
    text = str(plan())
    assert cells(text) == [
        ["asked", "0.5", "-", "-", "-"],
        ["least", "1", "100.0", "0.00", "1.2"],
        ["recommended, dropout", "7.5", "13.5", "2.12", "0.25"],
        ["plain", "100", "1.7", "-", "0"],
        ["layers.0.attention/0", "Bmm.self +1", "8x4x16", "2.0", "3", "0.12"],
    ]
    assert "recommended: budget_mb=7.5," in text
    assert "plain training holds 100.0 MB" in text
    assert "changes the gradient by 0.8" in text
    assert "below" not in text


def test_what_is_said_only_where_it_is_so():
    text = str(plan(calibration_bytes=3_000_000, dropout_error=NAN))
    assert "below 3.0 MB training has no room to calibrate" in text
    assert "seed" not in text


def test_many_sites_and_long_names():
    sites = tuple(site(n, f"model.{n}.{'part.' * 9}query/{n}", None) for n in range(20))
    rows = cells(str(plan(sites=sites)))[len(ROWS) :]
    assert [row[0][:4] for row in rows] == [f"{n}..." for n in range(SITES_SHOWN)]
    assert [row[0][-8:] for row in rows] == [f".query/{n}" for n in range(SITES_SHOWN)]
    assert {len(row[0]) for row in rows} == {NAME_WIDTH}
    assert {row[4] for row in rows} == {"exact"}
    assert "20 sites" in str(plan(sites=sites))


def test_the_number_of_the_layer_is_not_told_twice():
    name = f"model.{'part.' * 9}layer.7.query/0"
    (row,) = cells(str(plan(sites=(site(0, name),))))[len(ROWS) :]
    assert row[0] == ".." + name[2 - NAME_WIDTH :] and ".7." in row[0]


@pytest.mark.parametrize("noise", [0.8, NAN])
def test_json(tmp_path, noise):
    found = plan(dropout_error=noise)
    found.to_json(tmp_path / "plan.json")
    read = json.loads((tmp_path / "plan.json").read_text())
    assert read["recommended_bytes"] == 1e6 * found.recommended_mb == 7_500_000
    assert read["dropout_error"] == (None if math.isnan(noise) else noise)
    assert [row["planned_bytes"] for row in read["budgets"]] == [None, 10**6, 7_400_000, 6 * 10**7]
    assert read["sites"][0]["shape"] == [8, 4, 16]
