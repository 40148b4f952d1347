"""``daf_hf.plan``: what it says comes true, and the model does not notice."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny import batch, build, compressed, gradients, hooks_on_stack, weights
from torch import nn

import daf_hf
from daf_hf import BudgetError, budgets
from daf_hf.budgets import RECOMMENDED_ERROR

TRAINED = ["roberta", "gpt2", "llama"]


def state_of(model):
    """All that a caller could notice, as plain numbers."""
    tensors = {**weights(model), **{n: p.grad for n, p in model.named_parameters()}}
    return {
        "tensors": {name: None if t is None else t.tolist() for name, t in tensors.items()},
        "versions": [t._version for t in (*model.parameters(), *model.buffers())],
        "modes": [module.training for module in model.modules()],
        "own": [sorted(module.__dict__) for module in model.modules()],
        "hooks": [
            [*module._forward_hooks, *module._forward_pre_hooks] for module in model.modules()
        ],
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
    }


def test_the_model_is_left_as_it_was(any_model):
    _, model, inputs = any_model
    gradients(model, inputs)  # so that there are gradients
    model.eval()
    next(model.children()).train()
    before = state_of(model)
    with torch.no_grad():
        found = daf_hf.plan(model, inputs)
    after = state_of(model)
    assert [name for name in before if before[name] != after[name]] == []
    assert hooks_on_stack() is None
    assert 0 < found.least_bytes < found.recommended_bytes <= found.plain_bytes


def test_plain_bytes_are_those_of_plain_training(any_model):
    _, model, inputs = any_model
    daf, _ = compressed(model, math.inf)
    gradients(model, inputs, daf)
    assert daf_hf.plan(model, inputs).plain_bytes == daf.report.plain_bytes


def test_under_autocast(bert_model, bert_batch):
    daf, _ = compressed(bert_model, math.inf)
    with torch.autocast("cpu", torch.bfloat16):
        gradients(bert_model, bert_batch, daf)
        found = daf_hf.plan(bert_model, bert_batch)
    assert found.plain_bytes == daf.report.plain_bytes
    assert any(site.dtype == "bfloat16" for site in found.sites)


@pytest.mark.parametrize("name", TRAINED)
def test_more_budget_is_less_error(name):
    found = daf_hf.plan(build(name), batch(name))
    rows = found.budgets
    assert [row.budget_bytes for row in rows] == sorted({row.budget_bytes for row in rows})
    errors = [row.predicted_gradient_error for row in rows]
    assert all(a >= 0.99 * b for a, b in pairwise(errors))
    assert errors[0] > RECOMMENDED_ERROR > errors[-1] == 0
    for row in rows:
        assert row.planned_bytes <= row.budget_bytes
        assert row.ratio == found.plain_bytes / row.planned_bytes
    marked = {mark: row for row in rows for mark in row.marks}
    assert marked.keys() == {"least", "recommended", "dropout", "plain"}
    assert marked["recommended"].budget_bytes == found.recommended_bytes
    assert marked["recommended"].predicted_gradient_error <= RECOMMENDED_ERROR
    assert marked["dropout"].predicted_gradient_error <= found.dropout_error


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_planned_comes_true(name):
    model, inputs = build(name), batch(name)
    found = daf_hf.plan(model, inputs, budgets=[0.25])
    (row,) = (row for row in found.budgets if not row.marks)
    daf, _ = compressed(model, 0.25)
    gradients(model, inputs, daf)
    report = daf.report
    assert report.held_bytes_peak == pytest.approx(row.planned_bytes, rel=0.05)
    assert report.ratio == pytest.approx(row.ratio, rel=0.05)
    assert report.mean_bits == pytest.approx(row.mean_bits, rel=0.2)
    error = report.predicted_gradient_error
    assert row.predicted_gradient_error / 2 < error < 2 * row.predicted_gradient_error


@pytest.mark.parametrize("name", TRAINED)
def test_the_least_is_the_least(name):
    model, inputs = build(name), batch(name)
    least = daf_hf.plan(model, inputs).least_bytes / 1e6
    daf, _ = compressed(model, 1.01 * least)
    gradients(model, inputs, daf)
    daf, _ = compressed(model, 0.9 * least)
    with pytest.raises(BudgetError), daf:
        model(**inputs)


def test_room_to_calibrate(caplog):
    model, inputs = build("gpt2"), batch("gpt2")
    found = daf_hf.plan(model, inputs)
    assert found.least_bytes < found.calibration_bytes <= found.recommended_bytes
    for share, measured in ((1.01, True), (0.85, False)):
        daf, compressor = compressed(model, share * found.calibration_bytes / 1e6)
        gradients(model, inputs, daf)
        assert compressor.placement.calibrated == measured == ("no calibration" not in caplog.text)


def test_dropout_moves_the_gradient(bert_batch):
    some, much = (daf_hf.plan(build("bert", p), bert_batch).dropout_error for p in (0.05, 0.5))
    assert 0.01 < some < much
    without = daf_hf.plan(build("bert", 0.0), bert_batch)
    assert math.isnan(without.dropout_error)
    assert not any("dropout" in row.marks for row in without.budgets)


def test_the_dearest_sites_come_first(bert_model, bert_batch):
    found = daf_hf.plan(bert_model, bert_batch)
    prices = [site.price for site in found.sites]
    assert prices == sorted(prices, reverse=True) and prices[0] > 0
    recommended = next(row for row in found.budgets if "recommended" in row.marks)
    for site in found.sites:
        assert site.price == site.importance * site.plain_bytes
        assert site.plain_bytes == 4 * math.prod(site.shape)
        assert (site.bits is None) == (site.codec == "exact")
        assert site.consumer != "unknown"
    assert sum(site.planned_bytes for site in found.sites) <= recommended.planned_bytes


def test_budgets_of_ones_own(bert_model, bert_batch):
    found = daf_hf.plan(bert_model, bert_batch, {"budget_mb": 0.4}, budgets=["0.3", 0.001])
    rows = {row.budget_bytes: row for row in found.budgets}
    assert rows[300_000].marks == () and rows[400_000].marks == ("asked",)
    assert rows[300_000].planned_bytes <= 300_000
    too_small = rows[1000]
    assert math.isnan(too_small.planned_bytes) and math.isnan(too_small.predicted_gradient_error)
    assert sum(not row.marks for row in found.budgets) == 2


def test_inputs_may_be_one_tensor():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    found = daf_hf.plan(model, torch.randn(64, 64))
    assert found.sites and found.plain_bytes > found.least_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgets": []}, "at least one"),
        ({"budgets": ["much"]}, "budget_mb='much'"),
        ({"budgets": ["recommended"]}, "'recommended' is not a finite"),
        ({"budgets": [math.inf]}, "inf is not a finite"),
        ({"importance": "error"}, "predicts no gradient error"),
        ({"bits": (9,)}, "bits="),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_bad_options(bert_model, bert_batch, options, message):
    with pytest.raises(ValueError, match=message):
        daf_hf.plan(bert_model, bert_batch, **options)


def test_models_that_cannot_be_planned_for(bert_model, bert_batch):
    daf, _ = compressed(bert_model, 0.5)
    with daf, pytest.raises(ValueError, match="is being compressed"):
        daf_hf.plan(bert_model, bert_batch)
    with pytest.raises(RuntimeError, match=r"nothing could be measured: .*IndexError"):
        daf_hf.plan(bert_model, {**bert_batch, "input_ids": bert_batch["input_ids"] + 1000})
    with pytest.raises(RuntimeError, match="too small"):
        daf_hf.plan(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(ValueError, match="requires_grad"):
        daf_hf.plan(build("bert").requires_grad_(False), bert_batch)
    assert hooks_on_stack() is None


def test_without_memory_to_measure_in(bert_model, bert_batch, monkeypatch):
    monkeypatch.setattr(budgets, "FREE_SHARE", 1e-12)
    before = state_of(bert_model)
    with pytest.raises(RuntimeError, match="half of the free memory"):
        daf_hf.plan(bert_model, bert_batch)
    assert state_of(bert_model) == before
