"""compress_activations in plain loops."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from tiny import Watch, batch, build, hooks_on_stack, loss_of, nothing_held, relative_error, same
from torch import nn

from daf_hf import BudgetError, DAFConfig, MemoryReport, compress_activations, loops
from daf_hf.session import Session


def gradients_of(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("whole_loop", [False, True])
def test_around_the_micro_batch_or_the_loop(whole_loop):
    model = build("bert")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)

    def step(daf, seed):
        loss = loss_of(model(**batch("bert", seed=seed)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        daf.step()

    if whole_loop:
        with compress_activations(model, budget_mb=0.3) as daf:
            for seed in range(4):
                step(daf, seed)
    else:
        for seed in range(4):
            with compress_activations(model, budget_mb=0.3) as daf:
                step(daf, seed)
    assert isinstance(daf.report, MemoryReport)
    assert 0 < daf.report.held_bytes_peak <= 3e5
    assert daf._session.step == 4
    assert nothing_held(daf._session.compressor)
    assert hooks_on_stack() is None
    assert "forward" not in model.__dict__


def test_what_was_learnt_stays_with_the_model():
    model = build("bert")
    sessions = []
    for options in ({}, {}, {"importance": "error"}):
        with compress_activations(model, budget_mb=0.3, **options) as daf:
            loss_of(model(**batch("bert"))).backward()
        sessions.append(daf._session)
    assert sessions[0] is sessions[1] is not sessions[2]


def test_models_do_not_live_longer_for_it():
    model = build("bert")
    with compress_activations(model, budget_mb=0.3):
        loss_of(model(**batch("bert"))).backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_the_loss_outside_the_model_is_compressed():
    model = build("conv")
    inputs = batch("conv")
    labels = inputs.pop("labels")
    with compress_activations(model, budget_mb=1.0) as daf:
        watch = Watch(daf._session.compressor)
        logits = model(**inputs)["logits"]
        loss = nn.functional.cross_entropy(logits.repeat(500, 8), labels.repeat(500))
    loss.backward()
    assert watch.peak <= 1e6
    assert any("LogSoftmax" in c for s in watch.sites for c in s.consumers) or any(
        site.module == "" for site in watch.sites
    )


def test_too_small_for_the_loss_raises_in_backward():
    model = nn.Linear(64, 64)
    x = torch.randn(256, 64)
    with compress_activations(model, budget_mb=0.02) as daf:
        hidden = model(x)
        loss = sum((hidden + shift).exp().sin().sum() for shift in range(20))
    with pytest.raises(BudgetError, match="least that would do"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    del loss, hidden
    daf.set_budget(10)
    with daf:
        loss = model(x).exp().sum()
    loss.backward()


def test_options_come_from_anywhere(tmp_path):
    model = build("bert")
    path = tmp_path / "daf.yaml"
    path.write_text("budget_mb: 0.5\n")
    for config in ({"budget_mb": 0.5}, path, str(path)):
        daf = compress_activations(model, config, seed=3)
        assert daf._session.config.budget_mb == 0.5
        assert daf._session.config.seed == 3


@pytest.mark.parametrize("bad", [{"budget_mb": 0}, {"nonsense": 1}, {"bits": (9,)}])
def test_bad_options(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        compress_activations(build("bert"), **bad)


def test_nested_blocks():
    """The inner block ends nothing of the outer one; other options inside are refused."""
    model, inputs = build("bert"), batch("bert")
    with compress_activations(model, budget_mb=0.5) as outer:
        with compress_activations(model, budget_mb=0.5) as inner:
            loss_of(model(**inputs)).backward()
        assert inner._session is outer._session
        assert outer._session.installed
        loss_of(model(**inputs)).backward()
        for options in ({"budget_mb": 0.6}, {"budget_mb": 0.5, "importance": "error"}):
            with (
                pytest.raises(ValueError, match="compressed already, with other options"),
                compress_activations(model, **options),
            ):
                pass
        names = [site.name for site in outer.report.sites]
        assert len(names) == len({name for name in names if not name.startswith("model/")}) + sum(
            name.startswith("model/") for name in names
        )
    assert not outer._session.installed


def test_the_budget_is_that_of_the_block():
    """Not that which was set inside a block with other options."""
    model, inputs = build("bert"), batch("bert")
    for budget in ("0.5", 0.7, 0.5):
        with compress_activations(model, budget_mb=budget) as daf:
            assert daf.report.budget_bytes == float(budget) * 1e6
            loss_of(model(**inputs)).backward()
            daf.step()
            daf.set_budget("0.4")
            assert daf.report.budget_bytes == 0.4e6


def test_a_block_left_open_by_nobody_is_no_obstacle():
    model, inputs = build("bert"), batch("bert")
    one = compress_activations(model, budget_mb=0.5)
    other = compress_activations(model, budget_mb=0.6)
    with one, pytest.raises(ValueError, match="compressed already"), other:
        pass
    with other:
        loss_of(model(**inputs)).backward()
    assert 0 < other.report.held_bytes_peak <= 0.6e6


class Wide:
    """A metric that is an object, and cannot be copied."""

    def __init__(self):
        self.lock = threading.Lock()
        self.calls = 0

    def __call__(self, site, probe):
        self.calls += 1
        return 1.0


def test_a_metric_that_is_an_object():
    """What was learnt with it is kept from block to block."""
    model, inputs, metric = build("bert"), batch("bert"), Wide()
    for _ in range(3):
        with compress_activations(model, budget_mb=0.5, importance=metric):
            loss_of(model(**inputs)).backward()
        calls = metric.calls
    with compress_activations(model, budget_mb=0.5, importance=metric):
        loss_of(model(**inputs)).backward()
    assert metric.calls == calls


def test_two_models_side_by_side():
    first, second = build("bert"), build("gpt2")
    expected = []
    for model, name in ((first, "bert"), (second, "gpt2")):
        torch.manual_seed(0)
        loss_of(model(**batch(name))).backward()
        expected.append(gradients_of(model))
        model.zero_grad()
    with compress_activations(first), compress_activations(second, budget_mb=1.5):
        torch.manual_seed(0)
        a = loss_of(first(**batch("bert")))
        torch.manual_seed(0)
        b = loss_of(second(**batch("gpt2")))
    (a + b).backward()
    assert same(gradients_of(first), expected[0])
    assert relative_error(gradients_of(second), expected[1]) < 0.1
    assert hooks_on_stack() is None


def test_a_budget_set_meanwhile_lasts_from_block_to_block():
    model, inputs, sessions = build("bert"), batch("bert"), set()
    for step in range(4):
        with compress_activations(model, budget_mb=0.5) as daf:
            model(**inputs).loss.backward()
        daf.step()
        if step == 1:
            daf.set_budget(0.4)
        sessions.add(daf._session)
    assert len(sessions) == 1
    assert daf.report.budget_bytes == 0.4e6


def test_a_block_within_itself():
    """One object, entered twice: the outer block goes on when the inner one ends."""
    model, inputs = build("bert"), batch("bert")
    daf = compress_activations(model, budget_mb=0.3)
    with daf:
        with daf:
            loss_of(model(**inputs)).backward()
        assert hooks_on_stack() is not None
        loss_of(model(**inputs)).backward()
        assert 0 < daf.report.held_bytes_peak <= 0.3e6
    assert hooks_on_stack() is None
    assert "forward" not in model.__dict__


def test_a_session_that_ends_in_a_garbage_collection(monkeypatch):
    """In the thread that holds the lock: what restores a tensor meets the end of the session."""
    model, inputs = build("bert"), batch("bert")
    daf = compress_activations(model, budget_mb=0.3)
    with daf:
        loss_of(model(**inputs)).backward()
        daf.step()
        loss = loss_of(model(**inputs))
        placement = daf._session.compressor.placement
        ring = [daf._session]
        ring.append(ring)
        decode, ended = placement._pages.decode, []

        def collecting(*args):
            gc.collect()
            ended.append("forward" not in model.__dict__)
            return decode(*args)

        monkeypatch.setattr(placement._pages, "decode", collecting)
        weakref.finalize(daf._session, ended.append, "gone")
        loops._SESSIONS.pop(model)
        daf._session = None
        del ring
        loss.backward()
        daf._session = Session(model, DAFConfig())
    assert "gone" in ended and ended[-1] is True
    assert hooks_on_stack() is None
    assert not placement.arena.held_bytes
