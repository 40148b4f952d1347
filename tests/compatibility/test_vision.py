"""ResNet-18 under a budget: what a max-pooling's indices take, statistics, and accuracy."""

from __future__ import annotations

import math

import pytest
import torch
from cases_vision import images, resnet18
from tiny import compressed, weights


@pytest.mark.supports("Vision", "ResNet-18")
def test_running_statistics_are_those_of_plain_training():
    """Calibration leaves batch normalisation's statistics alone, bit for bit."""
    found = []
    for budget in (None, 1.0):
        torch.manual_seed(0)
        model, inputs = resnet18(), images(8)
        if budget is None:
            model(**inputs).loss.backward()
        else:
            with compressed(model, budget)[0]:
                model(**inputs).loss.backward()
        found.append({name: w for name, w in weights(model).items() if "running" in name})
    assert found[0]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.supports("Vision", "ResNet-18")
def test_indices_of_max_pooling_are_narrow():
    torch.manual_seed(0)
    model = resnet18()
    daf, _ = compressed(model, 1.0, calibrate_at=(0,))
    for _ in range(2):
        with daf:
            loss = model(**images(16)).loss
        loss.backward()
        daf.step()
    (indices,) = (
        s for s in daf.report.sites if s.consumer == "MaxPool2DWithIndicesBackward0.result1"
    )
    assert indices.dtype == "int64"
    assert indices.codec == "narrow"


@pytest.mark.supports("Vision", "ResNet-18")
def test_accuracy_at_a_ratio_of_8():
    """Under a budget of an eighth, full training comes to plain training's accuracy."""
    accuracy, budget_mb = [], math.inf
    for _ in range(2):
        torch.manual_seed(0)
        model = resnet18()
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        daf, _ = compressed(model, budget_mb, calibrate_at=(0,))
        for _ in range(20):
            with daf:
                loss = model(**images(16)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            daf.step()
        budget_mb = daf.report.plain_bytes / 8e6
        unseen = images(200)
        with torch.no_grad():
            guesses = model.eval()(unseen["pixel_values"]).logits.argmax(1)
        accuracy.append(100 * float((guesses == unseen["labels"]).float().mean()))
    assert daf.report.plain_bytes / daf.report.held_bytes_peak >= 8
    assert accuracy[0] > 95
    assert accuracy[1] >= accuracy[0] - 1
