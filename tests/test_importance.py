"""Importance metrics: their registry, how they are named, and what they rank."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch
from tiny import batch, build, compressed, gradients
from torch import nn

from daf_hf import DAFConfig, importance, register_importance
from daf_hf.importance import resolve_importance


@pytest.fixture
def registry(monkeypatch):
    """Registrations that end with the test."""
    monkeypatch.setattr(importance, "_METRICS", dict(importance._METRICS))


def constant(site, probe):
    return 1.0


def test_registered_name(registry):
    assert register_importance("mine")(constant) is constant
    assert resolve_importance("mine") is constant
    assert DAFConfig(importance="mine").importance == "mine"


def test_a_name_is_registered_once(registry):
    register_importance("mine")(constant)
    register_importance("mine")(constant)
    with pytest.raises(ValueError, match="'mine' is registered already"):
        register_importance("mine")(lambda site, probe: 2.0)
    with pytest.raises(ValueError, match="'gradient' is registered already"):
        register_importance("gradient")(constant)


def test_path(monkeypatch):
    module = types.ModuleType("some_metrics")
    module.constant = constant
    monkeypatch.setitem(sys.modules, "some_metrics", module)
    assert resolve_importance("some_metrics:constant") is constant


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("unheard", "use one of"),
        ("no_such_module:x", "cannot be loaded"),
        ("math:no_such_thing", "cannot be loaded"),
        ("math:pi", "not callable"),
        (":x", "cannot be loaded"),
        (None, "use one of"),
    ],
)
def test_what_is_no_metric(spec, message):
    with pytest.raises(ValueError, match=message):
        resolve_importance(spec)


@pytest.mark.parametrize("metric", ["gradient", "error", "magnitude", constant])
@pytest.mark.parametrize("allocator", ["greedy", "uniform"])
def test_every_metric_and_allocator_trains(metric, allocator):
    model, inputs = build("bert"), batch("bert")
    daf, compressor = compressed(model, 0.4, importance=metric, allocator=allocator)
    gradients(model, inputs, daf)
    measured = [s.importance for s in compressor.tracker.sites.values() if s.candidates]
    assert len(measured) > 10
    assert all(value is not None and math.isfinite(value) and value >= 0 for value in measured)
    assert compressor.ledger.peak.held <= 4e5
    predicted = daf.report.predicted_gradient_error
    assert (predicted > 0) == (metric == "gradient")


class TwoBranches(nn.Module):
    """Two branches with equal tensors, of which one hardly counts: two layers, or two kinds."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleDict({name: nn.Linear(64, 64) for name in names})

    def forward(self, x, y):
        loud, quiet = self.branches.values()
        return {"loss": (loud(x).square() + 1e-3 * quiet(y).square()).mean()}


def two_importances(names, metric):
    model = TwoBranches(names)
    daf, compressor = compressed(model, 0.2, importance=metric)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    gradients(model, {"x": x, "y": x.flip(0)}, daf)
    sites = {s.module: s.importance for s in compressor.tracker.sites.values() if s.module}
    return [sites[f"branches.{name}"] for name in names]


def test_gradient_importance_ranks_by_what_counts():
    loud, quiet = two_importances(["0", "1"], "gradient")
    assert loud > 1000 * quiet > 0


def test_kinds_of_parameters_count_alike():
    """Adam moves each as far as the other, whatever the scale of its gradient."""
    loud, quiet = two_importances(["loud", "quiet"], "gradient")
    assert loud == pytest.approx(quiet, rel=0.5)


@pytest.mark.parametrize("names", [["0", "1"], ["loud", "quiet"]])
def test_error_importance_is_blind_to_that(names):
    loud, quiet = two_importances(names, "error")
    assert loud == pytest.approx(quiet, rel=0.5)
