"""Plans: widths for the batch at hand, within the budget."""

from __future__ import annotations

import dataclasses
import math
import re
import time

import pytest
from tiny import batch, build, compressed, gradients, loss_of

from daf_hf.batches import signature
from daf_hf.sites import Batch


@pytest.fixture
def trained():
    model = build("bert")
    daf, compressor = compressed(model, 0.3)
    for _ in range(3):
        gradients(model, batch("bert"), daf)
        daf.step()
    return model, daf, compressor


def test_a_plan_expects_what_is_then_held(trained):
    _, daf, compressor = trained
    plan = daf._session.last_plan
    assert plan.nbytes <= 0.3e6
    assert compressor.ledger.step_peak.held <= 0.3e6
    assert compressor.ledger.peak.held > 0.85 * 0.3e6


def test_plans_are_kept_by_signature(trained):
    model, daf, _ = trained
    plan = daf._session.last_plan
    gradients(model, batch("bert", seed=5), daf)
    assert daf._session.last_plan is plan
    gradients(model, batch("bert", 4, 16), daf)
    assert daf._session.last_plan is not plan
    gradients(model, batch("bert", seed=6), daf)
    assert daf._session.last_plan is plan


def test_plans_are_dropped_with_the_budget(trained):
    model, daf, _ = trained
    plan = daf._session.last_plan
    daf.set_budget(0.2)
    gradients(model, batch("bert"), daf)
    assert daf._session.last_plan is not plan
    assert daf._session.last_plan.nbytes <= 0.2e6
    assert daf._session.last_plan.error > plan.error


def test_larger_batches_get_fewer_bits(trained):
    model, daf, _ = trained
    bits = []
    for examples in (4, 8, 16, 24):
        gradients(model, batch("bert", examples), daf)
        gradients(model, batch("bert", examples), daf)
        options = daf._session.last_plan.options.values()
        bits.append(sum(32 if o.bits is None else o.bits for o in options))
    assert bits == sorted(bits, reverse=True)
    assert bits[0] > bits[-1]


@pytest.mark.parametrize("bits", [(2,), (0, 1), (4, 8), (0, 1, 2, 3, 4, 5, 6, 7, 8)])
def test_only_the_allowed_bits_are_used(bits):
    model = build("bert")
    daf, _ = compressed(model, 0.6, bits=bits)
    gradients(model, batch("bert"), daf)
    used = {o.bits for o in daf._session.last_plan.options.values()}
    assert used <= {*bits, None}


def test_the_number_of_plans_is_bounded(trained, monkeypatch):
    monkeypatch.setattr("daf_hf.planning._PLANS_KEPT", 3)
    model, daf, _ = trained
    for examples in range(1, 8):
        gradients(model, batch("bert", examples), daf)
    assert len(daf._session.planner._plans) <= 3


def test_corrections_are_bounded_too(trained):
    """One a signature at the most, and one for each of its budgets."""
    _, daf, _ = trained
    assert len(daf._session.planner._corrections) <= 2
    assert signature(((), batch("bert"))) == signature(((), batch("bert", seed=3)))


def test_passes_side_by_side_share_the_budget(trained):
    model, daf, compressor = trained
    alone = daf._session.last_plan.nbytes
    for _ in range(2):
        with daf:
            losses = [model(**batch("bert", seed=seed)).loss for seed in range(2)]
        assert compressor.held_bytes() <= 0.3e6
        sum(losses).backward()
        del losses
    assert daf._session.last_plan.nbytes <= 0.5 * 0.3e6 < alone


def test_what_a_plan_missed_is_foreseen_however_much_is_padding(trained):
    _, daf, _ = trained
    planner, batch = daf._session.planner, daf._session.last_plan.batch
    planner.forget()
    other = dataclasses.replace(batch, unpadded=batch.examples * batch.tokens - 7)
    plan = planner.plan("key", batch)
    before = planner.choices("key", other).fixed_bytes
    planner.learn_from("key", plan, plan.nbytes + 20_000)
    assert planner.choices("key", other).fixed_bytes == before + 20_000
    assert planner.choices("another", other).fixed_bytes == before


def test_what_is_remembered_is_bounded(trained):
    _, daf, compressor = trained
    planner, plan = daf._session.planner, daf._session.last_plan
    for number in range(300):
        compressor.set_limit(2e5 + number)
        planner.plan("key", plan.batch)
        planner.learn_from("key", plan, plan.nbytes + 10_000)
        planner.plan("key", Batch(8, 16 + number))
    assert len(planner._plans) <= 256
    assert len(planner._corrections) <= 512
    assert len(planner._choices) <= 4


def timed(monkeypatch, caplog, time_budget, budget_mb=0.5, token_seconds=1e-4):
    """The planner and plan of a model whose codecs take 10 ns an element, more with wide codes."""
    monkeypatch.setattr(
        "daf_hf.codec_times.CodecTimes.seconds",
        lambda self, codec, bits, numel, dtype: 1e-8 * numel * (1 + bits / 8),
    )
    monkeypatch.setattr(
        "daf_hf.calibration.Calibration._time_plain",
        lambda self, size: setattr(self, "token_seconds", token_seconds),
    )
    model, inputs = build("bert", 0.0), batch("bert")
    daf, _ = compressed(model, budget_mb, time_budget=time_budget)
    caplog.clear()
    gradients(model, inputs, daf)
    session = daf._session
    warned = [r.getMessage() for r in caplog.records if "time_budget" in r.getMessage()]
    return session.last_plan, session.planner._plain_seconds(session.last_plan.batch), warned


def seconds_of(plan):
    return sum(option.seconds for option in plan.options.values())


def test_a_time_budget_is_kept_to_within_the_bytes(monkeypatch, caplog):
    free, plain, warned = timed(monkeypatch, caplog, 1e3)
    share = seconds_of(free) / plain
    assert share > 0 and not warned
    plan, _, warned = timed(monkeypatch, caplog, 0.9 * share)
    assert 0 < seconds_of(plan) <= 0.9 * share * plain
    assert plan.nbytes <= 0.5e6 and not warned
    assert plan.error >= free.error


def test_where_both_cannot_be_kept_to_bytes_come_first(monkeypatch, caplog):
    plan, plain, warned = timed(monkeypatch, caplog, 1e-6)
    assert plan.nbytes <= 0.5e6 and plan.least_seconds > 1e-6 * plain
    assert len(warned) == 1
    enough = float(re.search(r"time_budget=(\S+) would do", warned[0])[1])
    plan, _, warned = timed(monkeypatch, caplog, enough)
    assert seconds_of(plan) <= enough * plain and plan.least_seconds is None and not warned


def test_plain_trainings_time_is_measured():
    model, inputs = build("bert"), batch("bert")
    for time_budget, known in ((0.5, True), (math.inf, False)):
        daf, _ = compressed(model, 1.0, time_budget=time_budget)
        began = time.perf_counter()
        gradients(model, inputs, daf)
        planner = daf._session.planner
        assert (planner.token_seconds is not None) == known
        if known:
            size = planner._plain_seconds(daf._session.last_plan.batch)
            assert 0 < size < time.perf_counter() - began
        model = build("bert")


def test_what_is_held_before_a_pass_is_no_part_of_it():
    """It takes its room, and leaves the rest to one forward pass, in every step alike."""
    model, held = build("bert"), 60_000
    daf, compressor = compressed(model, 0.3, calibrate_at=(0,))
    lease = compressor.placement.reserve(held)
    for _ in range(4):
        with daf:
            loss = model(**batch("bert")).loss
        assert compressor.held_bytes() <= 0.3e6
        loss.backward()
        del loss
        daf.step()
        assert 0.3e6 - held - 30_000 < daf._session.last_plan.nbytes <= 0.3e6 - held
    del lease


def test_what_was_learnt_before_anything_was_measured_is_forgotten(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, 0.05, calibrate_at=(0, 2), on_overflow="spill")
    planner = daf._session.planner
    errors = []
    for number in range(5):
        if number == 2:
            daf.set_budget(0.3)
        with daf:
            loss_of(bert_model(**bert_batch)).backward()
        daf.step()
        errors.append(daf._session.last_plan.error)
        if number == 1:
            assert not compressor.placement.calibrated and any(planner._corrections.values())
    assert compressor.placement.calibrated
    assert errors[2] < 1.5 * errors[4]


def test_passes_that_overlapped_once_are_forgotten():
    """As when outputs of several passes were kept by mistake."""
    model, inputs = build("bert"), batch("bert")
    daf, _ = compressed(model, 0.5)
    gradients(model, inputs, daf)
    daf.step()
    planner = daf._session.planner
    gradients(model, inputs, daf)
    least = planner.least_bytes
    with daf:
        kept = [model(**inputs) for _ in range(5)]
    assert planner._overlap == 5
    del kept
    for _ in range(12):
        gradients(model, inputs, daf)
        daf.step()
    assert planner._overlap == 1
    assert planner.least_bytes <= 1.05 * least
