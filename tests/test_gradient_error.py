"""Errors of gradients: each kind of parameters counts, whatever its scale."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, build, compressed, gradients
from torch import nn

from daf_hf.gradient_error import GradientError, kind_of, squared_norm


class Layers(nn.Module):
    """Two layers of one kind, a head, and an adapter's module that is trained in full."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.head = nn.Linear(4, 12, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.out = nn.ModuleDict({"modules_to_save": nn.ModuleDict({"default": nn.Linear(4, 1)})})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.11.mlp.weight", "model.layers.mlp.weight"),
        ("h.0.attn.experts.3.weight", "h.attn.experts.weight"),
        ("head.weight", "head.weight"),
    ],
)
def test_layers_of_one_kind(name, kind):
    assert kind_of(name) == kind


def test_the_error_is_the_mean_over_kinds_by_their_elements():
    """Two layers of 4 x 4 against a head of 48 elements; biases and weights beside them apart."""
    errors = GradientError(Layers())
    assert [tuple(p.shape) for p in errors.parameters] == [(4, 4), (4, 4), (12, 4), (1, 4), (1,)]
    reference = [torch.full_like(p, 1000.0) for p in errors.parameters]
    change = [torch.zeros_like(p) for p in errors.parameters]
    change[0] += 100.0  # of one layer of two: 0.1^2 / 2 of that kind
    change[2] += 500.0
    expected = (32 * 0.005 + 48 * 0.25) / (32 + 48)
    assert errors.of(change, reference) == pytest.approx(expected)
    change[3] += 1000.0  # 4 of the 5 elements that are trained in full
    assert errors.of(change, reference) == pytest.approx(expected + 0.8)


def test_what_has_no_gradient_does_not_count():
    errors = GradientError(Layers())
    reference = [None, None, torch.ones(12, 4), torch.zeros(1, 4), None]
    change = [None, None, torch.full((12, 4), 2.0), torch.zeros(1, 4), None]
    assert errors.of(change, reference) == pytest.approx(4.0)
    assert errors.of([None] * 5, [None] * 5) == 0.0
    assert squared_norm(change) == 48 * 4


def test_a_gradient_of_rounding_alone_does_not_count():
    """The bias of a key: softmax does not see it."""
    layer = nn.Linear(64, 64)
    errors = GradientError(layer)
    change = [torch.full_like(layer.weight, 1e-3), torch.full_like(layer.bias, 1e-9)]
    reference = [torch.ones_like(layer.weight), torch.full_like(layer.bias, 1e-9)]
    assert errors.of(change, reference) == pytest.approx(1e-6, rel=0.02)
    reference[1] = torch.full_like(layer.bias, 1e-3)  # small, but more than rounding
    change[1] = torch.full_like(layer.bias, 1e-3)
    assert errors.of(change, reference) == pytest.approx(1 / 65, rel=0.01)


def test_a_large_head_does_not_hide_the_adapters():
    """With the head's gradient scaled up, what serves the adapters stays as important."""
    importances = []
    for scale in (1.0, 100.0):
        model, inputs = build("bert", dropout=0.0), batch("bert")
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.register_hook(lambda gradient, scale=scale: gradient * scale)
        daf, compressor = compressed(model, 5.0)
        gradients(model, inputs, daf)
        importances.append(
            {
                site.name: site.importance
                for site in compressor.tracker.sites.values()
                if ".lora_A" in site.module and site.candidates
            }
        )
    assert importances[0]
    assert importances[0] == pytest.approx(importances[1], rel=1e-3)
