"""A model under compression: exact without a budget, within any other, and unharmed."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math

import pytest
import torch
from tiny import (
    MODELS,
    Watch,
    batch,
    build,
    compressed,
    gradients,
    loss_of,
    needs_compiler,
    nothing_held,
    relative_error,
    same,
    weights,
)
from torch import nn

from daf_hf import BudgetError, DAFConfig
from daf_hf.handles import Kept
from daf_hf.session import Session

INF = float("inf")
MB = 1e6


def least_of(error):
    """The least budget that a BudgetError names."""
    assert f"budget_mb={error.least_mb:.2f} is the least" in str(error)
    return error.least_mb


def refusal_of(run, *args):
    """The least budget that the run's BudgetError names; nothing of it stays alive."""
    with pytest.raises(BudgetError, match="Largest") as caught:
        run(*args)
    return least_of(caught.value)


def trainer_of(model, lr=1e-2):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)


def step(model, daf, optimizer, inputs):
    with daf:
        loss = loss_of(model(**inputs))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    daf.step()
    return float(loss.detach())


# Exact without a budget --------------------------------------------------------------------------


def test_without_a_budget_gradients_are_equal_bit_for_bit(any_model):
    _, model, inputs = any_model
    expected = gradients(model, inputs)
    daf, compressor = compressed(model, INF)
    assert same(gradients(model, inputs, daf), expected)
    assert nothing_held(compressor)


def test_without_a_budget_a_run_is_equal_bit_for_bit(any_model):
    name, model, _ = any_model
    twin = copy.deepcopy(model)
    daf, _ = compressed(model, INF)
    for network, scope in ((twin, None), (model, daf)):
        optimizer = trainer_of(network)
        for seed in range(3):
            gradients(network, batch(name, seed=seed), scope, seed)
            optimizer.step()
    assert same(weights(model), weights(twin))


def test_without_a_budget_held_is_what_plain_training_holds(any_model):
    _, model, inputs = any_model
    daf, _ = compressed(model, INF)
    gradients(model, inputs, daf)
    report = daf.report
    assert report.held_bytes_peak == report.exact_bytes_peak == report.plain_bytes > 0
    assert report.ratio == 1


# Within a budget ---------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_held_bytes_never_exceed_the_budget(any_model, share):
    name, model, inputs = any_model
    daf, _ = compressed(model, INF)
    gradients(model, inputs, daf)
    budget = share * daf.report.plain_bytes / MB
    daf, compressor = compressed(model, budget)
    watch = Watch(compressor)
    optimizer = trainer_of(model)
    for seed in range(3):
        step(model, daf, optimizer, batch(name, seed=seed))
        assert nothing_held(compressor)
    assert 0 < watch.peak <= watch.footprint_peak <= budget * MB
    assert watch.peak == daf.report.held_bytes_peak


def test_gradients_get_better_with_the_budget(bert_model, bert_batch):
    expected = gradients(bert_model, bert_batch)
    errors = []
    for budget in (0.1, 0.3, 0.9):
        daf, _ = compressed(bert_model, budget, seed=round(100 * budget))
        gradients(bert_model, bert_batch, daf)
        errors.append(relative_error(gradients(bert_model, bert_batch, daf), expected))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 1
    assert errors[-1] < 0.01


def test_changing_batches_leave_everything_flat(bert_model):
    daf, compressor = compressed(bert_model, 0.3)
    watch = Watch(compressor)
    optimizer = trainer_of(bert_model)
    sizes = [(8, 16), (3, 7), (12, 30), (1, 16), (5, 24), (16, 8)]
    reserved, sites = [], []
    for number in range(60):
        examples, tokens = sizes[number % len(sizes)]
        step(bert_model, daf, optimizer, batch("bert", examples, tokens, seed=number))
        assert nothing_held(compressor)
        reserved.append(compressor.arena.reserved_bytes)
        sites.append(len(compressor.tracker.sites))
    assert watch.peak <= 0.3 * MB
    assert len(set(sites[12:])) == 1
    assert max(reserved) <= 0.3 * MB
    gc.collect()
    before = len(gc.get_objects())
    for number in range(12):
        examples, tokens = sizes[number % len(sizes)]
        step(bert_model, daf, optimizer, batch("bert", examples, tokens, seed=number))
    gc.collect()
    assert len(gc.get_objects()) - before < 200


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", MODELS)
def test_too_small_a_budget_names_one_that_does(name, dropout):
    for examples, tokens in ((8, 16), (16, 9)):
        model, inputs = build(name, dropout), batch(name, examples, tokens)
        optimizer = trainer_of(model)
        before = weights(model)
        daf, compressor = compressed(model, 0.01)
        least = refusal_of(step, model, daf, optimizer, inputs)
        after = weights(model)
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        assert all(torch.equal(before[n], after[n]) for n in trained)
        assert not any(p.grad is not None for p in model.parameters())
        gc.collect()
        assert nothing_held(compressor)
        daf, compressor = compressed(model, least * 1.01)
        watch = Watch(compressor)
        for _ in range(3):
            assert math.isfinite(step(model, daf, optimizer, inputs))
        assert watch.peak <= least * 1.01 * MB
        assert watch.peak > 0.5 * least * MB or least <= 0.02


def test_a_refused_budget_can_be_raised_and_trained_with(bert_model, bert_batch):
    daf, _ = compressed(bert_model, 0.01)
    optimizer = trainer_of(bert_model)
    least = refusal_of(step, bert_model, daf, optimizer, bert_batch)
    daf.set_budget(least * 1.01)
    for _ in range(2):
        step(bert_model, daf, optimizer, bert_batch)
    assert 0 < daf.report.held_bytes_peak <= least * 1.01 * MB


def test_refusal_after_an_exception_in_forward_is_forgotten(bert_model, bert_batch):
    """Also where the scope is around the whole loop."""
    daf, _ = compressed(bert_model, 0.05, calibrate_at=())

    def fail(*_):
        raise ValueError("here")

    with daf:
        handle = bert_model.base_model.model.classifier.register_forward_hook(fail)
        with pytest.raises(ValueError, match="here"):
            bert_model(**batch("bert", 64, 30))
        handle.remove()
        loss_of(bert_model(**batch("bert", 1, 4))).backward()


@pytest.mark.parametrize("name", ["bert", "gpt2", "conv"])
def test_spilling_trains_under_any_budget(name):
    model, inputs = build(name), batch(name)
    expected = gradients(model, inputs)
    daf, compressor = compressed(model, 0.01, on_overflow="spill")
    watch = Watch(compressor)
    measured = gradients(model, inputs, daf)
    assert watch.peak <= 0.01 * MB
    assert compressor.ledger.counts["spilled"] > 0
    assert measured.keys() == expected.keys()
    assert nothing_held(compressor)


def test_spilling_everything_is_exact(bert_model, bert_batch):
    expected = gradients(bert_model, bert_batch)
    daf, compressor = compressed(bert_model, 1e-6, on_overflow="spill")
    assert same(gradients(bert_model, bert_batch, daf), expected)
    assert compressor.ledger.peak.held == 0


def test_a_longer_batch_later_on_spills_rather_than_dies(bert_model, caplog):
    daf, compressor = compressed(bert_model, 0.12)
    optimizer = trainer_of(bert_model)
    watch = Watch(compressor)
    step(bert_model, daf, optimizer, batch("bert"))
    step(bert_model, daf, optimizer, batch("bert", 32, 60))
    assert watch.peak <= 0.12 * MB
    assert nothing_held(compressor)


def test_what_is_spilled_for_want_of_room_is_said(bert_model, bert_batch, caplog):
    """Beside a pass that is still held a budget is not refused; but it is not silent either."""
    daf, compressor = compressed(bert_model, 0.12)
    with daf:
        losses = [loss_of(bert_model(**bert_batch)) for _ in range(4)]
    sum(losses).backward()
    assert compressor.ledger.counts["spilled"] > 0
    assert sum("is spilled to a file" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("budget", [0.15, 0.3, INF])
def test_the_report_says_how_each_site_was_stored(budget):
    """With a plan, without one (no probe fits the least of these budgets), without a budget."""
    model, inputs = build("vit"), batch("vit")
    daf, compressor = compressed(model, budget)
    gradients(model, inputs, daf)
    report = daf.report
    encoded = [site for site in report.sites if site.codec not in ("exact", "derived")]
    assert all(site.bits is not None for site in encoded)
    assert bool(encoded) == (report.stored_bytes_peak > 0) == (budget != INF)
    assert compressor.placement.calibrated == (budget == 0.3)


def test_weights_outside_the_model_are_kept():
    """Of a head that is applied outside, inside the block."""
    model, head = nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 64)
    frozen = nn.Linear(64, 64).requires_grad_(False)
    daf, compressor = compressed(model, 5.0)
    x = torch.randn(64, 64)
    kept = []
    save = compressor._save

    def watch(tensor, frame):
        handle = save(tensor, frame)
        base = tensor if tensor._base is None else tensor._base
        if base is head.weight or base is frozen.weight:
            kept.append(type(handle))
        return handle

    compressor._save = watch
    with daf:
        frozen(head(model(x)).relu()).sum().backward()
    assert kept == [Kept, Kept]


def test_several_forwards_share_the_budget(bert_model):
    daf, compressor = compressed(bert_model, 0.6)
    watch = Watch(compressor)
    for _ in range(3):
        with daf:
            losses = [loss_of(bert_model(**batch("bert", seed=seed))) for seed in range(3)]
        sum(losses).backward()
        del losses
        daf.step()
    assert watch.peak <= 0.6 * MB
    assert nothing_held(compressor)


# The budget changes ------------------------------------------------------------------------------


def test_budget_changes_between_steps(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, 0.8)
    optimizer = trainer_of(bert_model)
    watch = Watch(compressor)
    taken = []
    for budget in (0.8, 0.3, 0.15, 0.5, INF, 0.3):
        daf.set_budget(budget)
        watch.peak = watch.footprint_peak = 0
        step(bert_model, daf, optimizer, bert_batch)
        assert watch.footprint_peak <= budget * MB
        assert compressor.arena.reserved_bytes <= budget * MB
        assert daf.report.budget_bytes == budget * MB
        taken.append(watch.footprint_peak)
    assert taken[2] < taken[1] < taken[0]


def test_budget_falls_while_a_graph_is_alive(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, 0.2)
    with daf:
        loss = loss_of(bert_model(**bert_batch))
    assert compressor.held_bytes() > 0.12 * MB
    reserved = compressor.arena.reserved_bytes
    daf.set_budget(0.12)
    assert compressor.held_bytes() <= 0.12 * MB
    assert compressor.arena.reserved_bytes < reserved
    loss.backward()
    assert all(p.grad.isfinite().all() for p in bert_model.parameters() if p.requires_grad)


def test_a_budget_below_the_least_is_raised_in_mid_run(bert_model, bert_batch, caplog):
    daf, compressor = compressed(bert_model, 0.5)
    optimizer = trainer_of(bert_model)
    step(bert_model, daf, optimizer, bert_batch)
    with caplog.at_level(logging.WARNING, "daf_hf"):
        daf.set_budget(0.001)
    assert "below the least" in caplog.text
    assert 0.001 * MB < compressor.arena.limit_bytes < 0.5 * MB
    step(bert_model, daf, optimizer, bert_batch)


@pytest.mark.parametrize("bad", [0, -1, math.nan, "little", None])
def test_bad_budget(bert_model, bad):
    daf, _ = compressed(bert_model, 0.5)
    with pytest.raises(ValueError, match="budget_mb"):
        daf.set_budget(bad)


# What cannot be compressed -----------------------------------------------------------------------


def test_a_model_without_anything_to_train():
    model = build("bert").requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad=True.*adapter"):
        Session(model, DAFConfig(budget_mb=1))


def test_a_model_that_saves_nothing():
    model = nn.Linear(4, 4)
    daf, _ = compressed(model, 1.0)
    with daf:
        model(torch.randn(2, 4)).sum().backward()
    report = daf.report
    assert report.stored_bytes_peak == 0
    assert str(report)


def test_exclude_keeps_exactly(bert_model, bert_batch):
    expected = gradients(bert_model, bert_batch)
    daf, compressor = compressed(bert_model, 10.0, exclude=("*",))
    assert same(gradients(bert_model, bert_batch, daf), expected)
    assert all(site.codec == "exact" for site in daf.report.sites)
    assert compressor.ledger.peak.stored == 0


def test_include_compresses_only_what_it_names(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, 2.0, include=("*.intermediate.*",), bits=(2,))
    gradients(bert_model, bert_batch, daf)
    compressible = {s.module for s in compressor.tracker.sites.values() if s.compressible}
    assert compressible
    assert all(".intermediate." in module for module in compressible)


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_no_module_is_named(bert_model, option):
    patterns = ("*.attention.*", "*.atention.*")
    with pytest.raises(ValueError, match=rf"{option}='\*\.atention\.\*' matches no module"):
        compressed(bert_model, 2.0, **{option: patterns})


def test_a_loss_outside_the_model_gets_its_share_of_the_budget():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(256, 64)
    model(x).square().mean().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    daf, _ = compressed(model, 0.2)  # just enough for all but the loss
    for _ in range(3):
        model.zero_grad()
        with daf:
            loss = model(x).square().mean()
        loss.backward()
        daf.step()
    measured = {n: p.grad for n, p in model.named_parameters()}
    assert relative_error(measured, expected) < 0.5  # 1.0 where the loss is left with 0 bits


# Installing --------------------------------------------------------------------------------------


def test_install_and_remove_leave_the_model_as_it_was(bert_model, bert_batch):
    before = {name: dict(module.__dict__) for name, module in bert_model.named_modules()}
    session = Session(bert_model, DAFConfig(budget_mb=0.5))
    for _ in range(2):
        session.install()
        session.install()
        session.remove()
        session.remove()
    for name, module in bert_model.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_model_has_one_session(bert_model, bert_batch, caplog):
    """A session that nobody removed does not rule over the next one."""
    stale = Session(bert_model, DAFConfig(budget_mb=0.01))
    stale.install()
    session = Session(bert_model, DAFConfig(budget_mb=0.5))
    session.install()
    assert "an earlier compression" in caplog.text
    loss_of(bert_model(**bert_batch)).backward()
    assert session.compressor.ledger.peak.held > 0
    assert stale.compressor.ledger.peak.held == 0
    stale.remove()
    assert Session.of(bert_model) is session
    session.remove()
    assert "forward" not in bert_model.__dict__
    assert not any(module._forward_hooks for module in bert_model.modules())


def test_a_session_that_nobody_holds_leaves_the_model(bert_model):
    session = Session(bert_model, DAFConfig(budget_mb=0.5))
    session.install()
    del session
    gc.collect()
    assert "forward" not in bert_model.__dict__
    assert not any(module._forward_hooks for module in bert_model.modules())


def test_no_budget_for_a_while(bert_model, bert_batch):
    """What passes without a budget held says nothing of those with one."""
    daf, compressor = compressed(bert_model, 0.3)
    errors = []
    for budget in (0.3, INF, 0.3, INF, INF, 0.3, 0.3):
        daf.set_budget(budget)
        gradients(bert_model, bert_batch, daf)
        daf.step()
        errors.append(daf.report.predicted_gradient_error)
        assert compressor.arena.limit_bytes == budget * MB
        assert compressor.ledger.pass_peak <= 0.3 * MB or budget == INF
    assert max(errors) <= 2 * errors[0]


def test_no_gradient_no_compression(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, 0.5)
    with daf, torch.no_grad():
        bert_model(**bert_batch)
    assert compressor.ledger.peak.held == 0
    assert not compressor.tracker.sites


# Compilation -------------------------------------------------------------------------------------


@pytest.fixture
def compiler():
    """Skips where torch.compile cannot work."""
    needs_compiler()
    yield
    torch._dynamo.reset()


class Scored(nn.Module):
    """A small network and its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(
            nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64)
        )

    def forward(self, x):
        return self.network(x).square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("budget", [INF, 0.2])
def test_compiled_models(compiler, budget, outside):
    """Compiled before or after the model is handed over."""
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    plain, model = Scored(), Scored()
    compiled = torch.compile(model)
    plain(x).backward()
    expected = {n: p.grad for n, p in plain.named_parameters()}
    daf, compressor = compressed(compiled if outside else model, budget)
    for _ in range(3):
        model.zero_grad()
        with daf:
            loss = compiled(x)
        loss.backward()
        del loss
        daf.step()
    measured = {n: p.grad for n, p in model.named_parameters()}
    assert relative_error(measured, expected) < (1e-5 if budget == INF else 0.3)
    assert compressor.ledger.peak.held > 0
    assert nothing_held(compressor)


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("budget", [0.2, INF])
def test_a_forward_pass_that_begins_in_a_backward_pass_is_compressed(
    budget, around, bert_model, bert_batch
):
    """As gradient caches do it: their losses' backward pass makes the model's own."""
    daf, compressor = compressed(bert_model, budget)
    expected = gradients(bert_model, bert_batch)

    def run(_):
        torch.manual_seed(7)
        with torch.enable_grad(), contextlib.nullcontext() if around else daf:
            loss = loss_of(bert_model(**bert_batch))
        loss.backward()

    bert_model.zero_grad(set_to_none=True)
    outer = torch.ones(1, requires_grad=True) * 1
    outer.register_hook(run)
    with daf if around else contextlib.nullcontext():
        outer.sum().backward()
    found = {n: p.grad for n, p in bert_model.named_parameters() if p.grad is not None}
    assert 0 < daf.report.held_bytes_peak <= budget * MB
    assert "recomputed" not in daf.report.counts
    assert relative_error(found, expected) < (0.2 if budget == 0.2 else 1e-9)
    gc.collect()
    assert nothing_held(compressor)


def test_a_fall_in_the_first_forward_from_no_budget_is_refused_there(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, INF)
    layer = next(m for n, m in bert_model.named_modules() if n.endswith("layer.0"))
    layer.register_forward_hook(lambda *_: daf.set_budget(0.02))
    with daf, pytest.raises(BudgetError, match="would do"):
        bert_model(**bert_batch)
    gc.collect()
    assert nothing_held(compressor)
