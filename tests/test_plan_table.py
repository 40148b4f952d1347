"""The plan for people: short, dearest first."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from tiny import batch, build, compressed, gradients

from daf_hf.accounting import MemoryReport, SiteReport
from daf_hf.plan_table import plan_table


def site(consumer, plain_bytes, codec="group+normal", bits=2):
    return SiteReport("a/0", consumer, (4, 8), "float32", plain_bytes, codec, bits, None)


def table(*sites, **figures):
    report = MemoryReport(sites=sites, **figures)
    return plan_table(SimpleNamespace(report=lambda: report))  # type: ignore[arg-type]


def cells(text):
    """The rows below the heading, cell by cell."""
    rows = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def test_one_row_a_consumer_dearest_first():
    text = table(
        site("Few.x", 200_000),
        site("Many.x", 100_000, "group+normal", 0),
        site("Many.x", 400_000, "token+normal", 4),
        site("Many.x", 100_000, "exact", None),
        site("unknown", 70_000, "exact", None),
    )
    assert cells(text) == [
        ["Many.x", "token+normal, group+normal, exact", "0-4, exact", "3", "0.6"],
        ["Few.x", "group+normal", "2", "1", "0.2"],
        ["not probed", "exact", "exact", "1", "0.07"],
    ]


@pytest.mark.parametrize(("count", "name"), [(1, "small (1 kind)"), (3, "small (3 kinds)")])
def test_small_consumers_share_the_last_row(count, name):
    small = [site(f"Small{number}.x", 20_000, bits=number) for number in range(count)]
    text = table(*small, site("Large.x", 50_000))
    assert [row[0] for row in cells(text)] == ["Large.x", name]
    bits = "0" if count == 1 else "0-2"
    assert cells(text)[-1][1:] == ["various", bits, str(count), f"{0.02 * count:g}"]


def test_what_the_plan_predicts():
    figures = {"budget_bytes": 300_000, "held_bytes_peak": 250_000, "plain_bytes": 5_000_000}
    text = table(**figures, predicted_gradient_error=0.1234)
    assert text.endswith("budget 0.3 MB, held 0.25 MB, plain 5.0 MB, predicted gradient error 0.12")
    assert table(predicted_gradient_error=math.nan).endswith("gradient error not measured")


def test_of_a_model():
    model = build("bert")
    daf, _ = compressed(model, 0.3)
    gradients(model, batch("bert"), daf)
    text = plan_table(daf._session)
    counts = [int(row[3]) for row in cells(text) if row[3]]  # long cells take several lines
    assert sum(counts) == len(daf._session.report().sites) > 2 * len(counts)
    assert not any(line.endswith(" ") for line in text.splitlines())
