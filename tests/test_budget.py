"""A budget that anybody may change at any moment."""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading

import pytest
import torch
from tiny import MODELS, Watch, batch, build, compressed, gradients, loss_of, nothing_held

from daf_hf import BudgetError, compress_activations

MB = 1e6


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def step(model, daf, optimizer, inputs):
    with daf:
        loss = loss_of(model(**inputs))
    loss.backward()
    finite = all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    optimizer.step()
    optimizer.zero_grad()
    daf.step()
    return finite


class Interrupted:
    """A lock; when it is free again, something happens first, as in another thread it might."""

    def __init__(self, lock, act):
        self._lock, self._act, self._acting = lock, act, False

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()
        if not self._acting:
            self._acting = True
            self._act()
            self._acting = False


def whenever_it_can(compressor, act):
    """Call ``act`` after every pack and every decoding."""
    lock = Interrupted(compressor.lock, act)
    compressor.lock = compressor.placement.lock = lock


def warnings_in(caplog):
    return [r for r in caplog.records if r.name == "daf_hf" and r.levelno >= logging.WARNING]


# At every moment ---------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["device", "host"])
@pytest.mark.parametrize("name", MODELS)
def test_a_random_budget_whenever_it_can_and_unpack(name, packing, freed_pages_are_noise, caplog):
    model, inputs = build(name), batch(name)
    daf, compressor = compressed(model, 0.5, packing=packing)
    optimizer, draw = optimizer_of(model), random.Random(0)
    step(model, daf, optimizer, inputs)
    least = daf._session.planner.least_bytes
    arena = compressor.arena

    def change():
        daf.set_budget(math.exp(draw.uniform(math.log(0.5 * least / MB), math.log(3))))
        floor = 0 if not math.isinf(arena.cheapest_demotion()) else arena.held_bytes
        assert arena.held_bytes <= max(arena.limit_bytes, floor)
        assert arena.reserved_bytes <= max(arena.limit_bytes, floor)
        with compressor.lock:
            arena.check()

    whenever_it_can(compressor, change)
    for _ in range(3):
        assert step(model, daf, optimizer, inputs)
        assert nothing_held(compressor)
    assert len([r for r in warnings_in(caplog) if "is below" in r.message]) <= 1
    assert arena.demotions


def test_held_bytes_follow_the_budget_of_the_moment_through_many_steps(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, 0.5)
    bert_batch = {
        name: value[:4, :8] if value.dim() > 1 else value[:4] for name, value in bert_batch.items()
    }
    optimizer, draw = optimizer_of(bert_model), random.Random(1)
    step(bert_model, daf, optimizer, bert_batch)
    watch, arena = Watch(compressor), compressor.arena
    least = daf._session.planner.least_bytes / MB

    def change():
        assert watch.held() <= arena.limit_bytes or math.isinf(arena.cheapest_demotion())
        daf.set_budget(draw.uniform(least, 4 * least))
        assert watch.held() <= arena.limit_bytes or math.isinf(arena.cheapest_demotion())

    whenever_it_can(compressor, change)
    for _ in range(50):
        assert step(bert_model, daf, optimizer, bert_batch)
        assert arena.held_bytes == 0


@pytest.mark.parametrize("packing", ["device", "host"])
@pytest.mark.parametrize("name", ["roberta", "gpt2", "conv"])
def test_another_thread_changes_it_all_the_time(name, packing, freed_pages_are_noise):
    model, inputs = build(name), batch(name)
    daf, compressor = compressed(model, 0.5, packing=packing, calibrate_at=(0, 2))
    optimizer, draw, errors = optimizer_of(model), random.Random(2), []
    step(model, daf, optimizer, inputs)
    over = threading.Event()

    def change():
        try:
            while not over.wait(0.0005):  # without a pause the others hardly get their turn
                daf.set_budget(draw.choice((0.05, 0.1, 0.3, 1.0, math.inf)))
                with compressor.lock:
                    compressor.arena.check()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        assert all([step(model, daf, optimizer, inputs) for _ in range(4)])
    finally:
        over.set()
        thread.join()
    assert not errors
    daf.set_budget(0.5)
    assert nothing_held(compressor)


def test_a_fall_in_mid_forward_holds_for_the_next_tensor(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, 0.2)
    optimizer = optimizer_of(bert_model)
    step(bert_model, daf, optimizer, bert_batch)
    moments, arena = itertools.count(), compressor.arena
    seen = []

    def fall():
        if next(moments) == 60:
            daf.set_budget(0.16)
        seen.append(arena.held_bytes)

    whenever_it_can(compressor, fall)
    assert step(bert_model, daf, optimizer, bert_batch)
    assert max(seen[:60]) > 0.16 * MB
    assert max(seen[60:]) <= 0.16 * MB
    assert arena.reserved_bytes <= 0.16 * MB


def test_until_a_recommended_budget_is_known_the_old_one_holds(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, 0.16)
    optimizer = optimizer_of(bert_model)
    step(bert_model, daf, optimizer, bert_batch)
    moments, seen = itertools.count(), []

    def ask():
        if next(moments) == 60:
            daf.set_budget("recommended")
        seen.append(compressor.arena.held_bytes)

    whenever_it_can(compressor, ask)
    step(bert_model, daf, optimizer, bert_batch)
    assert len(seen) > 60 and max(seen) <= 0.16 * MB == compressor.arena.limit_bytes
    step(bert_model, daf, optimizer, bert_batch)
    assert compressor.arena.limit_bytes != 0.16 * MB
    assert compressor.arena.limit_bytes < math.inf


# The plan ----------------------------------------------------------------------------------------


def test_back_at_a_budget_the_plan_is_what_it_was(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, 0.3, calibrate_at=(0,))
    optimizer = optimizer_of(bert_model)
    for _ in range(3):
        step(bert_model, daf, optimizer, bert_batch)
    before, calibrated = daf._session.last_plan, daf._session.schedule.calibrated_at
    moments = itertools.count()
    whenever_it_can(compressor, lambda: next(moments) == 30 and daf.set_budget(0.12))
    step(bert_model, daf, optimizer, bert_batch)
    step(bert_model, daf, optimizer, bert_batch)
    assert daf._session.last_plan.error > before.error
    daf.set_budget(0.3)
    step(bert_model, daf, optimizer, bert_batch)
    assert daf._session.last_plan.error == before.error
    assert daf._session.last_plan.options == before.options
    assert daf._session.schedule.calibrated_at == calibrated


def test_no_budget_and_a_budget_again_in_mid_forward(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, 0.4)
    optimizer = optimizer_of(bert_model)
    step(bert_model, daf, optimizer, bert_batch)
    budgets = itertools.cycle([math.inf] * 7 + [0.4] * 7)
    whenever_it_can(compressor, lambda: daf.set_budget(next(budgets)))
    for _ in range(3):
        assert step(bert_model, daf, optimizer, bert_batch)
        assert compressor.arena.held_bytes == 0


# Too small ---------------------------------------------------------------------------------------


def test_too_small_a_budget_is_told_once(bert_model, bert_batch, caplog):
    daf, compressor = compressed(bert_model, 0.5)
    optimizer = optimizer_of(bert_model)
    step(bert_model, daf, optimizer, bert_batch)
    for budget in (0.001, 0.002, 0.001):
        daf.set_budget(budget)
        assert compressor.arena.limit_bytes == daf._session.planner.least_bytes
        step(bert_model, daf, optimizer, bert_batch)
    assert len([r for r in warnings_in(caplog) if "below the least" in r.message]) == 1


@pytest.mark.parametrize("on_overflow", ["error", "spill"])
def test_with_nothing_measured_no_budget_is_raised(bert_model, bert_batch, on_overflow, caplog):
    options = {"calibrate_at": (), "on_overflow": on_overflow}
    daf, compressor = compressed(bert_model, 2, **options)
    optimizer = optimizer_of(bert_model)
    for _ in range(3):
        step(bert_model, daf, optimizer, bert_batch)
    watch, held = Watch(compressor), compressor.ledger.peak.held
    for limit in (0.8 * held, 0.5 * held):
        daf.set_budget(limit / MB)
        assert compressor.arena.limit_bytes == pytest.approx(limit)
        watch.peak = 0
        assert step(bert_model, daf, optimizer, bert_batch)
        assert 0.5 * limit < watch.peak <= limit
    assert not any("below the least" in r.message for r in warnings_in(caplog))


def test_what_is_held_exactly_stays_until_it_is_freed(bert_model, bert_batch, caplog):
    daf, compressor = compressed(bert_model, math.inf)
    with daf:
        loss = loss_of(bert_model(**bert_batch))
    daf.set_budget(0.2)
    assert compressor.arena.held_bytes > 0.2 * MB
    assert any("0.2 is below what is held" in r.message for r in warnings_in(caplog))
    loss.backward()
    assert nothing_held(compressor)


def test_a_fall_in_the_first_forward_still_names_what_would_do(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, 0.5)
    whenever_it_can(compressor, lambda: daf.set_budget(0.01))
    with pytest.raises(BudgetError, match=r"budget_mb=0\.01 is too small"), daf:
        bert_model(**bert_batch)


# The schedule ------------------------------------------------------------------------------------


def test_the_schedule_sets_the_budget_of_each_step(bert_model, bert_batch, caplog):
    caplog.set_level(logging.INFO, "daf_hf")
    schedule = [(2, 0.2), (4, 0.4)]
    daf, compressor = compressed(bert_model, 0.5, budget_schedule=schedule)
    optimizer, limits = optimizer_of(bert_model), []
    for _ in range(5):
        limits.append(compressor.arena.limit_bytes / MB)
        step(bert_model, daf, optimizer, bert_batch)
    assert limits == [0.5, 0.5, 0.2, 0.2, 0.4]
    assert "budget 0.5 -> 0.2 MB (the schedule at step 2)" in caplog.text


def test_a_budget_set_by_hand_lasts_until_the_next_change(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, 0.5, budget_schedule=[(0, 0.4), (3, 0.2)])
    optimizer, limits = optimizer_of(bert_model), []
    for number in range(4):
        if number == 1:
            daf.set_budget(0.3)
        limits.append(compressor.arena.limit_bytes / MB)
        step(bert_model, daf, optimizer, bert_batch)
    assert limits == [0.4, 0.3, 0.3, 0.2]


def test_the_same_options_around_each_micro_batch(bert_model, bert_batch):
    limits = []
    for _ in range(3):
        daf = compress_activations(bert_model, budget_mb=0.5, budget_schedule=[(0, 0.4), (2, 0.3)])
        with daf:
            loss_of(bert_model(**bert_batch)).backward()
        limits.append(daf.report.budget_bytes / MB)
        daf.step()
    assert limits == [0.4, 0.4, 0.3]


def test_fractions_need_a_trainer(bert_model):
    with pytest.raises(ValueError, match="use step numbers"):
        compress_activations(bert_model, budget_mb=0.5, budget_schedule=[(0.5, 0.4)])


def test_who_hears_of_what_is_spilled_may_ask_for_the_report(caplog):
    """A handler of the log that reads the report: nothing is told while the lock is held."""
    model, inputs = build("bert"), batch("bert")
    daf, _ = compressed(model, 0.3, calibrate_at=(0,))
    gradients(model, inputs, daf)
    daf.step()
    reports = []

    class Asking(logging.Handler):
        def emit(self, record):
            reports.append((record.getMessage(), daf.report.held_bytes_peak))

    logger, handler = logging.getLogger("daf_hf"), Asking()
    logger.addHandler(handler)
    try:
        daf._session.budget.running = False  # else it is raised to the least that would do
        daf.set_budget(0.05)
        gradients(model, inputs, daf)
        daf.step()
    finally:
        logger.removeHandler(handler)
    assert any("the rest is spilled" in message for message, _ in reports)
