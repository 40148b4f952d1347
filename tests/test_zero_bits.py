"""Errors at 0 bits: measured at a few sites of a kind, and told of the others."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, build, compressed, gradients
from torch import nn

from daf_hf.batches import batch_of
from daf_hf.gradient_error import kind_of
from daf_hf.graph_probe import GraphProbe
from daf_hf.zero_bits import ZERO_SITES


class Pools(nn.Module):
    """Averages values with weights that are nearly one-hot: at their mean they say nothing."""

    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        weights = (self.query(x) * 20).softmax(-1)
        return {"loss": (weights @ self.value(x)).square().mean()}


def test_zero_bits_are_measured():
    """Every element at its mean is another error than rounding's, and is priced as measured."""
    torch.manual_seed(0)
    model, x = Pools(), torch.randn(8, 64, 64)
    daf, compressor = compressed(model, 0.5, calibration_batch=8)
    gradients(model, {"x": x}, daf)
    sites = [s for s in compressor.tracker.sites.values() if s.candidates]
    assert sites
    for site in sites:
        assert site.error_at_zero > 0
        for codec, bits in site.candidates:
            option = daf._session.planner._option(site, batch_of(((), {"x": x})), codec, bits)
            assert option.costs[0] >= site.error_at_zero
            assert option.costs[1:] == tuple(
                site.importance * d for d in site.distortions[codec][1:]
            )
    weights = next(s for s in sites if "SoftmaxBackward" in s.consumer)
    extrapolated = weights.importance * min(d[0] for d in weights.distortions.values())
    assert weights.error_at_zero > 1.2 * extrapolated or weights.error_at_zero > 0.5


class Stack(nn.Module):
    """Layers that differ in nothing but their depth."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(depth)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return {"loss": x.square().mean()}


def test_zero_bits_are_measured_at_a_few_sites_of_akind_of(monkeypatch):
    depth, x = 3 * ZERO_SITES, torch.randn(8, 16, 64)
    measured, error_at_zero = [], GraphProbe.error_at_zero

    def counted(self, site):
        measured.append(site)
        return error_at_zero(self, site)

    monkeypatch.setattr(GraphProbe, "error_at_zero", counted)
    every = {}
    for at_most in (ZERO_SITES, depth):
        monkeypatch.setattr("daf_hf.zero_bits.ZERO_SITES", at_most)
        measured.clear()
        torch.manual_seed(0)
        model = Stack(depth)
        daf, compressor = compressed(model, 1.0, calibration_batch=8)
        gradients(model, {"x": x}, daf)
        kinds = [kind_of(site.name) for site in set(measured)]
        assert max(map(kinds.count, kinds), default=0) == at_most
        every[at_most] = {
            site.name: site.error_at_zero
            for site in compressor.tracker.sites.values()
            if site.error_at_zero is not None
        }
    few, all_ = every.values()
    assert few.keys() == all_.keys() and len(all_) >= depth
    assert len(set(few.values())) > len(few) // 2
    for name, error in few.items():
        assert error == pytest.approx(all_[name], rel=0.7), name


def test_zero_bits_that_are_not_allowed_are_not_measured():
    model, inputs = build("bert"), batch("bert")
    for options in ({"bits": (1, 2)}, {"importance": "error"}):
        daf, compressor = compressed(model, 0.5, **options)
        gradients(model, inputs, daf)
        assert all(s.error_at_zero is None for s in compressor.tracker.sites.values())
