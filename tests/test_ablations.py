"""benchmarks/ablations.py: what it takes as the truth, the bound, and the rows."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from tiny import batch, build

from daf_hf.allocation import Option, greedy
from daf_hf.codecs import GENERAL

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def ablations():
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("ablations")
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def measured(ablations):
    """Rows and choices of a tiny BERT whose adapters have left zero."""
    model = build("bert")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    rows, choices = ablations.rank_correlations(model, batch("bert"), ["gradient", "error"], [2, 4])
    return model, rows, choices


def test_a_measured_metric_ranks_sites_better_than_squared_error(measured):
    _, rows, choices = measured
    found = {(row["metric"], row["bits"]): row for row in rows}
    assert set(found) == set(itertools.product(("gradient", "error"), (2, 4)))
    assert all(row["sites"] == len(choices.large) > 5 for row in rows)
    assert found["gradient", 2]["by_kind"] > 0.8
    assert found["gradient", 2]["by_kind"] > found["error", 2]["by_kind"]


def test_fewer_bits_of_one_site_alone_change_the_gradient_more(ablations, measured):
    model, _, _ = measured
    errors, choices = ablations.single_site_errors(model, batch("bert"), [1, 8])
    assert errors.keys() == {(s.name, b) for s in choices.large for b in (1, 8)}
    for name in (site.name for site in choices.large):
        for few, many in zip(errors[name, 1], errors[name, 8], strict=True):
            assert 0 < many < few, name


def test_the_error_is_relative_to_adapters_and_to_the_rest(ablations):
    first, second, other = "m.0.lora_A", "m.1.lora_A", "m.1.lora_B"
    head = "c.modules_to_save.weight"
    exact = {first: [3.0], second: [4.0], other: [10.0, 0.0], head: [100.0]}
    found = {first: [3.0], second: [5.0], other: [10.0, 2.0], head: [110.0]}
    exact, found = ({n: torch.tensor(v) for n, v in g.items()} for g in (exact, found))
    of_all, by_kind = (ablations.squared_error(found, exact, kinds) for kinds in (False, True))
    assert of_all == pytest.approx((1 + 4) / (25 + 100) + 0.01)
    # Two elements of A's kind, two of B's: each relative to its own norm.
    assert by_kind == pytest.approx((2 * 1 / 25 + 2 * 4 / 100) / 4 + 0.01)
    assert ablations.squared_error(exact, exact, True) == 0.0


def site(*points):
    return [Option(nbytes, cost, GENERAL, 1) for nbytes, cost in points]


def test_the_relaxation_fills_hull_edges_in_part(ablations):
    sites = [site((0, 8.0), (4, 0.0)), site((0, 3.0), (3, 0.0))]
    assert ablations.relaxed_cost(sites, 2) == pytest.approx(8 + 3 - 2 * 2)
    assert ablations.relaxed_cost(sites, 5) == pytest.approx(3 - 1)
    assert ablations.relaxed_cost(sites, 100) == pytest.approx(0)
    assert ablations.relaxed_cost([site((5, 1.0))], 4) == math.inf


def test_no_plan_beats_the_bound(ablations):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        draw = torch.rand(3, 4, 2, generator=generator).tolist()
        sites = [site(*((round(20 * a), b) for a, b in points)) for points in draw]
        budget = 30
        fitting = [
            sum(o.cost for o in plan)
            for plan in itertools.product(*sites)
            if sum(o.nbytes for o in plan) <= budget
        ]
        bound = ablations.relaxed_cost(sites, budget)
        if fitting:
            assert bound <= min(fitting) + 1e-9
            assert bound <= sum(o.cost for o in greedy(sites, budget)) + 1e-9


def test_plans_of_allocators_against_the_bound(ablations, measured):
    _, _, choices = measured
    rows = ablations.allocator_gaps(choices, ["greedy", "uniform"], [8, 10_000])
    assert [(row["ratio"], row["allocator"]) for row in rows] == [
        (8, "greedy"), (8, "uniform"), (10_000, "greedy"), (10_000, "uniform"),
    ]  # fmt: skip
    best, same, *impossible = rows
    assert best["fits"] and 0 <= best["above_bound"] < 0.2
    assert same["above_bound"] > best["above_bound"]
    assert all(not row["fits"] and row["above_bound"] is None for row in impossible)


def test_it_runs_on_a_task(ablations, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablations, "trained", lambda options: (build("bert"), batch("bert")))
    path = tmp_path / "rows.json"
    ablations.main(
        ["--metrics", "gradient", "--bits", "2", "--allocators", "greedy", "--ratios", "8",
         "--json", str(path)]
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert "by_kind" in shown and "above_bound" in shown
    rows = json.loads(path.read_text())
    assert [row["metric"] for row in rows["correlations"]] == ["gradient"]
    assert [row["ratio"] for row in rows["allocators"]] == [8.0]
    found = {row["variant"]: row for row in rows["variants"]}
    assert list(found) == list(ablations.VARIANTS)
    on, off = found["all of it"], found["derived tensors stored"]
    assert 0 < on["measured"] < off["measured"] and on["predicted"] < off["predicted"]
    assert all(row["measured"] > 0 for row in found.values())
