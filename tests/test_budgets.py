"""What budgets are recommended, and which are warned of."""

from __future__ import annotations

import logging
import math
import re
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import batch, build, compressed, gradients, hooks_on_stack

import daf_hf
from daf_hf import BudgetError, DAFConfig, budgets
from daf_hf.batches import batch_of, signature
from daf_hf.budgets import HARMFUL_ERROR, RECOMMENDED_ERROR, BudgetSweep, round_up


@given(st.integers(1, 10**13))
def test_round_up_keeps_three_digits(nbytes):
    rounded = round_up(nbytes)
    assert nbytes <= rounded <= 1.01 * nbytes + 1
    assert len(str(rounded).rstrip("0")) <= 3


def sweep_of(name="bert"):
    model, inputs = build(name), batch(name)
    daf, _ = compressed(model, 0.5)
    gradients(model, inputs, daf)
    given = ((), inputs)
    return BudgetSweep(daf._session.planner, signature(given), batch_of(given))


def test_a_sweep_goes_from_the_fewest_bits_to_exactness():
    sweep = sweep_of()
    assert 0 < sweep.least_bytes < sweep.exact_bytes
    assert sweep.at(0).nbytes == sweep.at(sweep.least_bytes).nbytes == sweep.least_bytes
    exact = sweep.at(sweep.exact_bytes)
    assert exact.error == 0 and exact.nbytes == sweep.exact_bytes
    assert exact.mean_bits == 1  # of dropout's masks
    assert 0 < sweep.at(0).mean_bits < 1


@pytest.mark.parametrize("error", [0.01, 0.1, 0.25])
def test_the_budget_for_an_error_is_the_least(error):
    sweep = sweep_of()
    budget = sweep.budget_for(error)
    assert sweep.at(budget).error <= error < sweep.at(0.97 * budget).error


def test_the_budget_for_any_error_and_for_none():
    sweep = sweep_of()
    assert sweep.budget_for(math.inf) == round_up(sweep.least_bytes)
    assert sweep.at(sweep.budget_for(0)).error == 0


def test_a_recommended_budget_leaves_room_to_calibrate():
    sweep = sweep_of()
    assert sweep.recommended(0) == sweep.budget_for(RECOMMENDED_ERROR)
    assert sweep.recommended(sweep.exact_bytes) == round_up(sweep.exact_bytes)


# budget_mb="recommended" -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["roberta", "gpt2", "llama"])
def test_training_takes_what_plan_recommends(name, caplog):
    model, inputs = build(name), batch(name)
    torch.manual_seed(1)
    found = daf_hf.plan(model, inputs)
    daf, compressor = compressed(model, "recommended")
    with caplog.at_level(logging.INFO, "daf_hf"):
        gradients(model, inputs, daf, seed=1)
    assert daf.report.budget_bytes == compressor.arena.limit_bytes == found.recommended_bytes
    assert 0 < daf.report.held_bytes_peak <= found.recommended_bytes
    assert 0 < daf.report.predicted_gradient_error <= RECOMMENDED_ERROR
    assert f"-> {found.recommended_mb:g} MB (recommended)" in caplog.text
    gradients(model, inputs, daf)  # the same options again, and the same budget
    assert daf.report.budget_bytes == found.recommended_bytes


def test_the_recommended_may_be_asked_for_later(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, math.inf)
    gradients(bert_model, bert_batch, daf)
    daf.set_budget("recommended")
    gradients(bert_model, bert_batch, daf)
    chosen = compressor.arena.limit_bytes
    daf.set_budget(2 * chosen / 1e6)
    gradients(bert_model, bert_batch, daf)
    assert compressor.arena.limit_bytes == 2 * chosen
    daf.set_budget("recommended")
    gradients(bert_model, bert_batch, daf)
    assert compressor.arena.limit_bytes == chosen


def test_a_pass_that_trains_nothing_chooses_nothing(bert_model, bert_batch):
    class Reads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = bert_model

        def forward(self, frozen=False, **inputs):
            outputs = self.inner(**inputs)
            return {"loss": outputs["loss"].detach() if frozen else outputs["loss"]}

    model = Reads()
    daf, compressor = compressed(model, "recommended")
    with daf:
        model(frozen=True, **bert_batch)
    assert math.isinf(compressor.arena.limit_bytes)
    gradients(model, bert_batch, daf)
    assert math.isfinite(compressor.arena.limit_bytes)


def test_what_cannot_be_measured_is_no_ground_for_a_budget(bert_model, bert_batch, monkeypatch):
    monkeypatch.setattr(budgets, "FREE_SHARE", 1e-12)
    daf, _ = compressed(bert_model, "recommended")
    with pytest.raises(RuntimeError, match=r"budget_mb='recommended'.*Use a number"), daf:
        bert_model(**bert_batch)
    assert hooks_on_stack() is None


@pytest.mark.parametrize(
    "options", [{"importance": "error"}, {"calibrate_at": ()}], ids=lambda options: str(options)
)
def test_options_that_measure_no_error_recommend_none(options):
    with pytest.raises(ValueError, match=r"(importance|calibrate_at)=.*'recommended'.*use"):
        DAFConfig(budget_mb="recommended", **options)


# The warning -------------------------------------------------------------------------------------


def warnings_of(budget_mb, caplog, **options):
    caplog.clear()
    model, inputs = build("bert"), batch("bert")
    daf, _ = compressed(model, budget_mb, **options)
    with caplog.at_level(logging.WARNING, "daf_hf"):
        for seed in (1, 2):
            gradients(model, inputs, daf, seed)
            daf.step()
    return [r.getMessage() for r in caplog.records if "predicted gradient error" in r.getMessage()]


def test_a_harmful_budget_is_warned_of_once(caplog):
    harmful = sweep_of().budget_for(1.3 * HARMFUL_ERROR) / 1e6
    (warning,) = warnings_of(harmful, caplog)
    assert f"above {HARMFUL_ERROR:g}" in warning and "daf-hf plan" in warning
    (better,) = re.findall(r"budget_mb=([\d.]+) would", warning)
    assert warnings_of(float(better), caplog) == []
    assert warnings_of(harmful, caplog, importance="error") == []


def test_a_fall_into_the_harmful_range_is_warned_of(caplog):
    harmful = sweep_of().budget_for(1.3 * HARMFUL_ERROR) / 1e6
    model, inputs = build("bert"), batch("bert")
    daf, _ = compressed(model, 0.5)
    told = []
    with caplog.at_level(logging.WARNING, "daf_hf"):
        for budget in (0.5, harmful, harmful, 0.5, harmful, 0.99 * harmful):
            daf.set_budget(budget)
            caplog.clear()
            gradients(model, inputs, daf)
            daf.step()
            told.append("predicted gradient error" in caplog.text)
    assert told == [False, True, False, False, False, True]


def test_a_budget_that_cannot_be_met_is_refused_without_a_warning(caplog):
    with pytest.raises(BudgetError):
        warnings_of(0.8 * sweep_of().least_bytes / 1e6, caplog)
    assert "accuracy" not in caplog.text


@pytest.mark.parametrize("possible", [True, False])
def test_recommended_after_a_first_calibration_had_no_room(possible, caplog, monkeypatch):
    """It is measured with the room that there is; where that fails, training goes on."""
    model, inputs = build("bert"), batch("bert")
    daf, compressor = compressed(model, 0.02, on_overflow="spill", calibrate_at=(0,))
    for _ in range(2):
        gradients(model, inputs, daf)
        daf.step()
    assert not compressor.placement.calibrated
    before = compressor.arena.limit_bytes
    if not possible:
        monkeypatch.setattr("daf_hf.session.probe_room", lambda device: 1000.0)
    daf.set_budget("recommended")
    for _ in range(2):
        gradients(model, inputs, daf)
        daf.step()
    assert compressor.placement.calibrated == possible
    assert (compressor.arena.limit_bytes > before) == possible
    assert not daf._session.budget.undecided
    assert ("the budget stays" in caplog.text) != possible


# What no calibration measures --------------------------------------------------------------------


def distilled(model, inputs, teacher, daf, seed=1):
    """Gradients of a distillation at several temperatures, computed outside of the model."""
    plain = {name: value for name, value in inputs.items() if name != "labels"}
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with daf:
        logits = model(**plain)["logits"]
        loss = sum(
            torch.nn.functional.kl_div(
                (logits / t).log_softmax(-1), (teacher / t).softmax(-1), reduction="batchmean"
            )
            for t in range(1, 9)
        )
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.fixture
def distillation():
    """A language model, its inputs, and a teacher's log-probabilities."""
    model, inputs = build("gpt2"), batch("gpt2")
    with torch.no_grad():
        logits = model(**{k: v for k, v in inputs.items() if k != "labels"})["logits"]
    torch.manual_seed(3)
    return model, inputs, (logits + torch.randn_like(logits)).log_softmax(-1)


def test_a_recommended_budget_has_room_for_a_loss_outside_the_model(distillation, caplog):
    with caplog.at_level(logging.INFO, "daf_hf"):
        exact = distilled(*distillation, nullcontext())
        daf, compressor = compressed(distillation[0], "recommended")
        distilled(*distillation, daf)
        daf.step()
        first = compressor.arena.limit_bytes
        found = distilled(*distillation, daf)
        daf.step()
        raised = compressor.arena.limit_bytes
        assert first < 0.9 * raised
        assert float((found - exact).norm() / exact.norm()) < RECOMMENDED_ERROR
        distilled(*distillation, daf)
    assert compressor.arena.limit_bytes == raised
    assert daf.report.predicted_gradient_error <= RECOMMENDED_ERROR
    assert "outside of the model" in caplog.text


def test_the_model_is_not_starved_for_a_loss_outside_of_it(distillation):
    """Once a plan knows of it, the loss gives way no less than in the first step."""
    exact = distilled(*distillation, nullcontext())
    daf, compressor = compressed(distillation[0], "recommended")
    for _ in range(2):
        distilled(*distillation, daf)
        daf.step()
    daf, _ = compressed(distillation[0], 0.7 * compressor.arena.limit_bytes / 1e6)
    errors = []
    for _ in range(3):
        errors.append(float((distilled(*distillation, daf) - exact).norm() / exact.norm()))
        daf.step()
    assert max(errors) < 2 * errors[0] + 0.02
    assert errors[1] == errors[2]


@pytest.mark.parametrize("bits", [(2, 4), (0, 1, 2, 8)])
def test_a_plan_knows_at_once_what_a_loss_outside_the_model_holds(distillation, bits):
    daf, compressor = compressed(distillation[0], 0.9, bits=bits)
    for _ in range(2):
        distilled(*distillation, daf)
        daf.step()
    plan, peak = daf._session.last_plan, compressor.ledger.pass_peak
    assert plan.nbytes == pytest.approx(peak, rel=0.01)


def test_a_budget_of_ones_own_is_not_raised_for_it(distillation):
    daf, compressor = compressed(distillation[0], "recommended")
    distilled(*distillation, daf)
    daf.step()
    own = compressor.arena.limit_bytes + 1000
    daf.set_budget(own / 1e6)
    for _ in range(2):
        distilled(*distillation, daf)
        daf.step()
    assert compressor.arena.limit_bytes == own


def test_a_loss_that_leaves_the_model_too_little_is_warned_of(distillation, caplog):
    """The first plan is good: it does not know of the loss."""
    daf, compressor = compressed(distillation[0], "recommended")
    distilled(*distillation, daf)
    tight = compressor.arena.limit_bytes / 1e6
    daf, _ = compressed(distillation[0], tight)
    told = []
    for _ in range(3):
        with caplog.at_level(logging.WARNING, "daf_hf"):
            caplog.clear()
            distilled(*distillation, daf)
            daf.step()
            told.append("the predicted gradient error is" in caplog.text)
    assert told == [False, True, False]


def test_several_forward_passes_at_once_are_recommended_for(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, "recommended")
    limits = []
    for seed in range(3):
        torch.manual_seed(seed)
        with daf:
            loss = sum(bert_model(**bert_batch)["loss"] for _ in range(2))
        loss.backward()
        limits.append(compressor.arena.limit_bytes)
        daf.step()
    assert limits[1] == limits[2] == pytest.approx(2 * limits[0], rel=0.2)
