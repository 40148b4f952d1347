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
    monkeypatch.setattr(importance.METRICS, "_objects", dict(importance.METRICS._objects))


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


@pytest.mark.parametrize("spec", ["unheard", "no_such_module:x", "math:pi", "absent.py:x", None])
def test_what_is_no_metric(spec):
    with pytest.raises(ValueError, match=r"importance=.*use one of .*'gradient'"):
        resolve_importance(spec)


METRIC_FILE = """
def wide(site, probe):
    return float(site.shape[-1])
"""


@pytest.fixture
def metric_file(tmp_path):
    (tmp_path / "metrics.py").write_text(METRIC_FILE)
    return f"{tmp_path / 'metrics.py'}:wide"


@pytest.mark.parametrize(
    "metric", ["gradient", "error", "magnitude", "variance", "actnn", "gact", constant]
)
@pytest.mark.parametrize("allocator", ["greedy", "uniform"])
def test_every_metric_trains(metric, allocator):
    model, inputs = build("bert"), batch("bert")
    daf, compressor = compressed(model, 0.4, importance=metric, allocator=allocator)
    found = gradients(model, inputs, daf)
    assert found and all(bool(g.isfinite().all()) for g in found.values())
    measured = [s.importance for s in compressor.tracker.sites.values() if s.candidates]
    assert len(measured) > 10
    assert all(value is not None and math.isfinite(value) and value >= 0 for value in measured)
    assert compressor.ledger.peak.held <= 4e5
    predicted = daf.report.predicted_gradient_error
    assert (predicted > 0) == (metric == "gradient")


def test_a_file_of_the_users_is_a_metric(metric_file):
    model, inputs = build("bert"), batch("bert")
    daf, compressor = compressed(model, 0.4, importance=metric_file)
    gradients(model, inputs, daf)
    sites = [s for s in compressor.tracker.sites.values() if s.candidates]
    assert {s.importance for s in sites} <= {float(s.shape[-1]) for s in sites}


class Linear(nn.Module):
    """One linear layer under a loss whose gradient is known."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(256, 8, bias=False)
        self.scale = 3.0

    def forward(self, x):
        return {"loss": self.scale * self.layer(x).sum()}


def importance_of_linear(metric, x, scale=3.0):
    model = Linear()
    model.scale = scale
    daf, compressor = compressed(model, 10, importance=metric, calibration_batch=64)
    gradients(model, {"x": x}, daf)
    (site,) = [s for s in compressor.tracker.sites.values() if s.candidates]
    return site.importance


def test_variance_is_the_energy_about_the_mean():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) + 5
    expected = float(x.var(correction=0)) * x.numel()
    assert importance_of_linear("variance", x) == pytest.approx(expected, rel=1e-4)


def test_actnn_is_its_formula_for_a_linear_layer():
    """All of the output's gradient is 3, so that the rows' products can be summed by hand."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    ranges = x.amax(1) - x.amin(1)
    row_gradient = 8 * 3.0**2
    expected = 256 / 6 * float((ranges.square() * row_gradient).sum())
    assert importance_of_linear("actnn", x) == pytest.approx(expected, rel=1e-4)


def test_gact_is_the_variance_that_actnn_bounds():
    """The gradient of the weight is d^T x: its variance is that of the rounding, in closed form."""
    x = torch.rand(64, 256, generator=torch.Generator().manual_seed(0))
    low, high = x.aminmax(dim=1, keepdim=True)
    variance = ((x - low) * (high - x)).sum() * 8 * 3.0**2
    measured = importance_of_linear("gact", x)
    assert measured == pytest.approx(float(variance), rel=0.2)
    assert measured == pytest.approx(importance_of_linear("actnn", x), rel=0.3)


@pytest.mark.parametrize("metric", ["actnn", "gact"])
def test_published_sensitivities_follow_the_gradient(metric):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    once, twice = (importance_of_linear(metric, x, scale) for scale in (1.0, 2.0))
    assert twice == pytest.approx(4 * once, rel=1e-3)


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


@pytest.mark.parametrize("metric", ["actnn", "gact"])
@pytest.mark.parametrize("names", [["0", "1"], ["loud", "quiet"]])
def test_published_metrics_take_all_parameters_together(names, metric):
    loud, quiet = two_importances(names, metric)
    assert loud > 1000 * quiet > 0


@pytest.mark.parametrize("metric", ["error", "variance"])
@pytest.mark.parametrize("names", [["0", "1"], ["loud", "quiet"]])
def test_error_importance_is_blind_to_that(names, metric):
    loud, quiet = two_importances(names, metric)
    assert loud == pytest.approx(quiet, rel=0.5)
