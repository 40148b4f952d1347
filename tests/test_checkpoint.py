"""What a training has learnt goes on with it."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from test_callbacks import trainer_of
from tiny import MODELS, batch, build, compressed, loss_of, same, weights
from transformers import TrainerCallback

from daf_hf import DAFCallback, checkpoint
from daf_hf.calibration import Calibration
from daf_hf.checkpoint import FILE, restore, save

SAVING = {"save_strategy": "steps", "save_steps": 2}


def facts(plan):
    """A plan without objects of its process."""
    options = {
        site.name: (str(o.codec), o.bits, o.nbytes, o.cost) for site, o in plan.options.items()
    }
    return options, plan.nbytes, plan.error, plan.least_bytes


@pytest.fixture
def calibrations(monkeypatch):
    """Counts what is measured."""
    counted, run = [], Calibration.run

    def counting(self):
        counted.append(self)
        run(self)

    monkeypatch.setattr(Calibration, "run", counting)
    return counted


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_is_what_it_was_and_nothing_is_measured_again(name, tmp_path, calibrations):
    model, inputs, budget = build(name), batch(name), 1.0 if name in ("vit", "conv") else 0.2
    first, _ = compressed(model, budget, skip_padding=True)
    for _ in range(2):
        with first:
            loss_of(model(**inputs)).backward()
        first.step()
    save(first._session, tmp_path)
    with first:
        loss_of(model(**inputs)).backward()
    expected = facts(first._session.last_plan)
    calibrations.clear()
    again = build(name)
    again.load_state_dict(model.state_dict())
    second, compressor = compressed(again, budget, skip_padding=True)
    assert restore(second._session, tmp_path)
    second._session.begin_step(2)
    before, state = weights(again), torch.get_rng_state()
    with second:
        second._session.recall(again.forward, ((), inputs))
        assert same(weights(again), before)
        assert torch.equal(torch.get_rng_state(), state)
        again(**inputs)
    assert facts(second._session.last_plan) == expected
    assert not calibrations and not compressor.unplanned


def test_a_resumed_run_is_the_same_run(tmp_path, calibrations):
    whole = DAFCallback(budget_mb=0.2, calibrate_at=(0, 1))
    trainer = trainer_of(tmp_path / "whole", [whole])
    trainer.train()
    callback = DAFCallback(budget_mb=0.2, calibrate_at=(0, 1))
    trainer_of(tmp_path, [callback], max_steps=4, **SAVING).train()
    calibrations.clear()
    again = DAFCallback(budget_mb=0.2, calibrate_at=(0, 1))
    resumed = trainer_of(tmp_path, [again], **SAVING)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not calibrations
    assert same(weights(resumed.model), weights(trainer.model))
    assert again.report.predicted_gradient_error == whole.report.predicted_gradient_error


class Changing(TrainerCallback):
    """Sets a budget at the end of a step."""

    def __init__(self, callback, at, budget_mb):
        self.callback, self.at, self.budget_mb = callback, at, budget_mb

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.at:
            self.callback.set_budget(self.budget_mb)


class Limits(TrainerCallback):
    def __init__(self, callback):
        self.callback, self.seen = callback, []

    def on_step_end(self, args, state, control, **_):
        self.seen.append(self.callback._session.budget.limit_bytes / 1e6)


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        ({"budget_mb": 0.3}, [0.25, 0.2]),
        ({"budget_mb": 0.4}, [0.4, 0.2]),  # configured anew
    ],
)
def test_budget_and_place_in_the_schedule_are_restored(tmp_path, then, expected):
    schedule = {"budget_schedule": [(0, 0.3), (3, 0.2)]}
    callback = DAFCallback(budget_mb=0.3, **schedule)
    trainer_of(tmp_path, [Changing(callback, 1, 0.25), callback], max_steps=2, **SAVING).train()
    if then["budget_mb"] == 0.4:
        schedule = {"budget_schedule": [(3, 0.2)]}
    again = DAFCallback(**then, **schedule)
    limits = Limits(again)
    trainer = trainer_of(tmp_path, [again, limits], **SAVING)
    trainer.train(resume_from_checkpoint=True)
    assert limits.seen == expected
    again.set_budget(0.5)  # the object that the user holds works
    assert again.config.budget_mb == 0.5


def test_other_options_measure_again(tmp_path, calibrations, caplog):
    trainer_of(tmp_path, [DAFCallback(budget_mb=0.3)], max_steps=2, **SAVING).train()
    calibrations.clear()
    callback = DAFCallback(budget_mb=0.3, bits=(2, 4, 8))
    trainer_of(tmp_path, [callback], **SAVING).train(resume_from_checkpoint=True)
    assert len(calibrations) == 1
    assert "other options" in caplog.text


def state_of(model, folder, **options):
    """Writes the state of a step of the model under a budget, which was set to another since."""
    daf, _ = compressed(model, 0.3, calibrate_at=(0,), **options)
    with daf:
        loss_of(model(**batch("bert"))).backward()
    daf.set_budget(0.25)
    save(daf._session, folder)
    return checkpoint._state(daf._session)


def test_another_models_state_is_refused(tmp_path, caplog, bert_model):
    state_of(bert_model, tmp_path)
    for change in ("size", "trained", "dtype"):
        model = build("bert")
        if change == "size":
            model.add_module("more", torch.nn.Linear(3, 3))
        elif change == "trained":
            next(p for p in model.parameters() if not p.requires_grad).requires_grad_()
        else:
            model.to(torch.bfloat16)
        daf, compressor = compressed(model, 0.3)
        caplog.clear()
        assert not restore(daf._session, tmp_path)
        assert "another model" in caplog.text and "measured again" in caplog.text
        assert compressor.arena.limit_bytes == 0.3e6
    model = build("bert")
    again, compressor = compressed(model, 0.3, calibrate_at=(0,))
    assert restore(again._session, tmp_path)
    assert compressor.arena.limit_bytes == 0.25e6


def test_on_another_kind_of_device_all_is_measured_again(tmp_path, caplog, bert_model):
    state = state_of(bert_model, tmp_path)
    checkpoint._write({**state, "device": "cuda"}, tmp_path / FILE)
    model = build("bert")
    again, compressor = compressed(model, 0.3, calibrate_at=(0,))
    assert not restore(again._session, tmp_path)
    assert "another device (cuda, and not cpu)" in caplog.text
    assert compressor.arena.limit_bytes == 0.25e6  # the budget is the run's


def test_a_metric_of_ones_own_is_the_same_in_another_process(tmp_path, bert_model):
    def metric():
        def one(site, probe):
            return 1.0

        return one  # another object each time, as in another process

    state_of(bert_model, tmp_path, importance=metric())
    model = build("bert")
    again, _ = compressed(model, 0.3, calibrate_at=(0,), importance=metric())
    assert restore(again._session, tmp_path)
    other, _ = compressed(model, 0.3, calibrate_at=(0,), importance="error")
    assert not restore(other._session, tmp_path)


@pytest.mark.parametrize(
    ("schedule", "set_to", "expected"),
    [
        ([], None, 0.3),  # the schedule's budget goes with the schedule
        ([(9, 0.1)], None, 0.3),
        ([(0, 0.2)], None, 0.2),
        ([], 0.25, 0.25),  # set by hand: it stays
    ],
)
def test_the_budget_of_a_schedule_that_is_gone(tmp_path, schedule, set_to, expected, bert_model):
    first, _ = compressed(bert_model, 0.3, budget_schedule=[(0, 0.2)])
    if set_to:
        first.set_budget(set_to)
    save(first._session, tmp_path)
    model = build("bert")
    again, compressor = compressed(model, 0.3, budget_schedule=schedule)
    restore(again._session, tmp_path)
    again._session.begin_step(2)
    assert compressor.arena.limit_bytes == expected * 1e6


@pytest.mark.parametrize("harm", ["gone", "cut", "garbled", "other", "list", "newer"])
def test_without_a_readable_state_training_goes_on(tmp_path, calibrations, harm, caplog):
    trainer_of(tmp_path, [DAFCallback(budget_mb=0.3)], max_steps=2, **SAVING).train()
    path = tmp_path / "checkpoint-2" / FILE
    if harm == "gone":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:500])
    elif harm == "garbled":
        data = bytearray(path.read_bytes())
        data[200:800] = bytes(byte ^ 0x5A for byte in data[200:800])
        path.write_bytes(data)
    elif harm == "list":
        torch.save([1, 2], path)
    elif harm == "newer":
        state = checkpoint._read(path)
        state["parts"][0].append("what no site of ours has")
        checkpoint._write(state, path)
    else:
        torch.save({"something": 1}, path)
    calibrations.clear()
    callback = DAFCallback(budget_mb=0.3)
    trainer = trainer_of(tmp_path, [callback], **SAVING)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4 and len(calibrations) == 1
    assert 0 < callback.report.held_bytes_peak <= 0.3e6
    assert ("cannot be read" in caplog.text) == (harm != "gone")


def test_killed_in_mid_step(tmp_path):
    """The resumed run has the same plan and budget, and no file of the killed one is in use."""
    code = f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_checkpoint import *
        mode, out = sys.argv[1:]
        callback = DAFCallback(budget_mb=0.3, on_overflow="spill")
        class Doing(TrainerCallback):
            def on_step_begin(self, args, state, control, **_):
                if mode == "kill" and state.global_step == 3:
                    model = callback._session.compressor.model
                    model.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            def on_step_end(self, args, state, control, **_):
                if state.global_step == 1:
                    callback.set_budget(0.2)
                if state.global_step == 3 and mode != "kill":
                    print("PLAN", facts(callback._session.last_plan),
                          callback._session.budget.limit_bytes, flush=True)
        trainer = trainer_of(out, [callback, Doing()], **SAVING)
        trainer.train(resume_from_checkpoint=True if mode == "resume" else None)
    """
    spills = tmp_path / "spills"
    spills.mkdir()

    def run(mode, out):
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), mode, str(out)],
            capture_output=True,
            encoding="utf-8",
            timeout=200,
            env={**os.environ, "TMPDIR": str(spills)},
        )

    whole = run("whole", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert run("kill", tmp_path / "killed").returncode == -signal.SIGKILL
    assert not [path for path in spills.iterdir() if path.name.startswith("daf_hf")]
    resumed = run("resume", tmp_path / "killed")
    assert resumed.returncode == 0, resumed.stderr
    plans = [
        [line for line in r.stdout.splitlines() if line.startswith("PLAN")]
        for r in (whole, resumed)
    ]
    assert plans[0] == plans[1] and len(plans[0]) == 1


def test_no_budget_needs_no_state(tmp_path):
    for resume in (False, True):
        callback = DAFCallback()
        trainer = trainer_of(tmp_path, [callback], max_steps=2 + 2 * resume, **SAVING)
        trainer.train(resume_from_checkpoint=resume)
    assert callback.report.budget_bytes == math.inf


def test_a_budget_that_does_not_go_with_the_options_is_left(tmp_path, bert_model, caplog):
    first, _ = compressed(bert_model, 0.3)
    first.set_budget("auto")
    save(first._session, tmp_path)
    model = build("bert")  # of which the compressor alone would not hold on
    again, compressor = compressed(model, 0.3, budget_schedule=[(5, 0.2)])
    restore(again._session, tmp_path)
    assert compressor.arena.limit_bytes == 0.3e6
    assert "budget of the checkpoint is not taken up" in caplog.text


@pytest.mark.parametrize("on_overflow", ["error", "spill"])
def test_a_budget_that_was_raised_to_the_least_comes_back(tmp_path, on_overflow):
    """What was asked for would not do in the first step of the resumed run."""
    model, inputs = build("bert"), batch("bert")
    first, compressor = compressed(model, 0.5, on_overflow=on_overflow)
    for _ in range(2):
        with first:
            loss_of(model(**inputs)).backward()
        first.step()
        first.set_budget(0.001)
    least = compressor.arena.limit_bytes
    assert least > 1e3
    with first:
        loss_of(model(**inputs)).backward()
    save(first._session, tmp_path)
    again = build("bert")
    again.load_state_dict(model.state_dict())
    second, compressor = compressed(again, 0.5, on_overflow=on_overflow)
    assert restore(second._session, tmp_path)
    assert compressor.arena.limit_bytes == least
    assert second._session.budget.asked_bytes == 1e3
    with second:
        second._session.recall(again.forward, ((), inputs))
        loss_of(again(**inputs)).backward()
    assert facts(second._session.last_plan) == facts(first._session.last_plan)


def test_no_flipped_bit_is_taken_for_what_was_written(tmp_path, bert_model, caplog):
    state_of(bert_model, tmp_path)
    path = tmp_path / FILE
    whole, draw = path.read_bytes(), random.Random(0)
    written, model = checkpoint._read(path), build("bert")
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        again, _ = compressed(model, 0.3, calibrate_at=(0,))
        caplog.clear()
        if restore(again._session, tmp_path):  # of the zip's own records, which nobody reads
            assert repr(checkpoint._read(path)) == repr(written)
        else:
            assert "cannot be read" in caplog.text
