"""benchmarks/delayed_statistics.py: it quantizes what it says, with the statistics that it says."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from tiny import batch, build

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def delayed():
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("delayed_statistics")
    sys.path.remove(str(FOLDER))


def test_statistics_are_those_of_the_step_before(delayed):
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(8, 8, requires_grad=True)
    restored = {}
    for late in (False, True):
        hooks = delayed.Channels([8], 8, late)
        for shift in (0.0, 1.0):
            hooks._number = 0
            # A mean of 0, then of 1.
            restored[late, shift] = hooks._pack((x + shift) * weight.sum() / 64)
    for shift in (0.0, 1.0):
        torch.testing.assert_close(restored[False, shift], x + shift, atol=0.2, rtol=0)
    assert torch.equal(restored[False, 0.0], restored[True, 0.0])
    assert not torch.equal(restored[False, 1.0], restored[True, 1.0])
    # Every code has its level: what is far from the old mean is restored more coarsely.
    own, old = ((restored[late, 1.0] - x - 1).square().mean() for late in (False, True))
    assert own < old < 0.1


def test_rows_of_a_tiny_model(delayed):
    model = build("bert")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    before = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    width = model.config.hidden_size
    rows = delayed.compare(model, optimizer, [batch("bert")] * 3, [width], [1, 8])
    assert [(row["bits"], row["statistics"]) for row in rows] == [
        (1, "own"), (1, "delayed"), (8, "own"), (8, "delayed"),
    ]  # fmt: skip
    coarse, _, fine, late = rows
    assert 0 < fine["error"] < 0.1 * coarse["error"]
    assert 0 < fine["distortion"] < 0.01 < coarse["distortion"]
    # The same batch again, and a small step of the weights: hardly anything has moved.
    assert late["error"] == pytest.approx(fine["error"], rel=0.5)
    assert any(not torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
