"""Calibration: what it finds, and that it leaves no trace."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import random

import numpy as np
import pytest
import torch
from tiny import (
    batch,
    build,
    compressed,
    gradients,
    hooks_on_stack,
    lora,
    loss_of,
    nothing_held,
    relative_error,
)
from torch import nn

from daf_hf import calibration, compress_activations
from daf_hf.batches import scalar_loss
from daf_hf.probing import Graph


def state_of(model):
    """Everything that calibration must leave as it was."""
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "values": [t.detach().clone() for t in tensors],
        "identity": [id(t) for t in tensors],
        "versions": [t._version for t in tensors],
        "addresses": [t.data_ptr() for t in tensors],
        "gradients": [None if t.grad is None else t.grad.clone() for t in tensors],
        "modes": [m.training for m in model.modules()],
        "requires_grad": [t.requires_grad for t in tensors],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "random": random.getstate(),
        "hooks": [list(m._forward_hooks) + list(m._forward_pre_hooks) for m in model.modules()],
    }


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def differences(before, after):
    return [name for name in before if not equal(before[name], after[name])]


class Calibrates:
    """Runs the model's next calibration alone: the pass that follows it is not made."""

    def __init__(self, daf):
        self.session = daf._session

    def __call__(self, model, inputs):
        self.session._calibrate(model.forward, ((), inputs))


def test_calibration_leaves_no_trace(any_model):
    _, model, inputs = any_model
    gradients(model, inputs)  # so that there are gradients
    daf, compressor = compressed(model, 1e3)
    random.seed(1)
    np.random.seed(1)
    before = state_of(model)
    Calibrates(daf)(model, inputs)
    assert differences(before, state_of(model)) == []
    assert any(site.importance is not None for site in compressor.tracker.sites.values())
    assert nothing_held(compressor)
    assert hooks_on_stack() is None


class Breaks(nn.Module):
    """Uses every kind of randomness and a buffer, and raises at a given call."""

    def __init__(self, at, error):
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.zero = nn.Parameter(torch.zeros(64))
        self.register_buffer("calls", torch.zeros(()))
        self.at, self.error, self.count = at, error, 0

    def forward(self, x):
        self.calls += 1
        self.count += 1
        random.random(), np.random.rand(), torch.rand(1)
        y = self.norm(self.linear(x)).relu() * (1 + self.zero)
        if self.count == self.at:
            raise self.error
        return {"loss": y.square().mean()}


@pytest.mark.parametrize("error", [ValueError("here"), KeyboardInterrupt("here")], ids=repr)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_exception_in_calibration_leaves_no_trace(at, error):
    """Ctrl-C ends it; a model that cannot be run on part of its batch is tried otherwise."""
    model, x = Breaks(at, error), torch.randn(64, 64)
    daf, compressor = compressed(model, 1.0)
    before = state_of(model)
    try:
        Calibrates(daf)(model, {"x": x})
        assert isinstance(error, ValueError)
    except KeyboardInterrupt as caught:
        assert caught is error
        caught.__traceback__ = None
    assert model.count >= at
    assert differences(before, state_of(model)) == []
    assert hooks_on_stack() is None
    gc.collect()
    assert nothing_held(compressor)
    model.at = None
    with daf:
        loss_of(model(x)).backward()
    assert model.calls == 1


def test_a_failing_metric_is_the_users_to_see():
    def metric(site, probe):
        raise ZeroDivisionError("mine")

    model, inputs = build("bert"), batch("bert")
    daf, _ = compressed(model, 0.5, importance=metric)
    before = state_of(model)
    with pytest.raises(ZeroDivisionError, match="mine"), daf:
        model(**inputs)
    assert differences(before, state_of(model)) == []
    assert hooks_on_stack() is None


class Fixed(nn.Module):
    """Takes 24 positions of 16 channels only, or examples in threes only."""

    def __init__(self, threes=False):
        super().__init__()
        self.threes = threes
        self.layers = nn.Sequential(nn.Linear(16 * 24, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.threes:
            x = x.view(x.shape[0] // 3, 3, 16 * 24).flatten(0, 1)
        x.mul_(1.0)
        return self.layers(x.reshape(-1, 16 * 24))


@dataclasses.dataclass
class Output:
    scores: torch.Tensor


class Typed(Fixed):
    def forward(self, x):
        return Output(super().forward(x))


class Targets(Fixed):
    """Takes a list of targets, one dict an example."""

    def forward(self, x, targets):
        return {
            "loss": sum(
                (y - t["y"]).square().sum()
                for y, t in zip(super().forward(x), targets, strict=True)
            )
        }


def test_models_that_take_no_part_of_a_batch(caplog):
    """Whatever a model demands of its batch, training goes on, planned where it can be."""
    targets = [{"y": torch.randn(64)} for _ in range(24)]
    cases = {
        "fixed length": (Fixed(), {}),
        "examples in threes": (Fixed(threes=True), {}),
        "a dataclass": (Typed(), {}),
        "a list of targets": (Targets(), {"targets": targets}),
        "convolution": (
            nn.Sequential(nn.Conv1d(16, 64, 3), nn.GELU(), nn.Conv1d(64, 8, 24 - 2)),
            None,
        ),
        "batch normalisation": (
            nn.Sequential(nn.Flatten(), nn.Linear(16 * 24, 64), nn.BatchNorm1d(64), nn.GELU()),
            None,
        ),
    }
    for case, (model, more) in cases.items():
        x = torch.randn(24, 16, 24)
        before = x.clone()
        daf, compressor = compressed(model, 0.25, calibration_batch=1)
        with daf:
            outputs = model(x) if more is None else model(x=x, **more)
            scalar_loss(outputs, 0).backward()
        assert torch.equal(x, before), case
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()), case
        assert compressor.ledger.peak.held <= 0.25e6, case
        if case != "batch normalisation":  # of one example
            assert compressor.placement.calibrated, case
            assert not caplog.records, case


def test_inputs_are_not_changed():
    class Halves(nn.Linear):
        def forward(self, x):
            return super().forward(x.div_(2))

    model, x = Halves(64, 64), torch.ones(64, 64)
    daf, _ = compressed(model, 1.0)
    with daf:
        model(x).square().mean().backward()
    assert (x == 0.5).all()


def test_an_empty_batch():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    daf, compressor = compressed(model, 1.0)
    with daf:
        model(torch.randn(0, 64)).sum().backward()
        assert not compressor.placement.calibrated
        model(torch.randn(64, 64)).sum().backward()
    assert compressor.placement.calibrated


def test_nothing_saved_but_parameters():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))

        def forward(self, x):
            return (self.a * self.b).sum()

    model = Product()
    daf, _ = compressed(model, 1.0)
    with daf:
        model(torch.zeros(2, 3)).backward()
    assert torch.equal(model.a.grad, model.b)


def test_a_pass_that_trains_nothing_comes_first(caplog):
    """As a reference model's in preference training: the next pass is calibrated instead."""
    model, inputs = build("gpt2"), batch("gpt2")
    daf, compressor = compressed(model, 0.5)
    with daf:
        with model.disable_adapter():
            reference = model(**inputs)["logits"].detach()
        assert not compressor.placement.calibrated
        (model(**inputs)["logits"] - reference).square().sum().backward()
    assert compressor.placement.calibrated
    assert not [record for record in caplog.records if record.name == "daf_hf"]


class Contrast(nn.Module):
    """Each example against the others of its batch: one alone has neither loss nor gradient."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        y = self.tower(x)
        return nn.functional.cross_entropy(y.mean(1) @ x.mean(1).t(), torch.arange(len(x)))


@pytest.mark.parametrize(("examples", "calibrated"), [(2.5, True), (1.3, False)])
def test_a_loss_that_compares_examples(examples, calibrated, caplog):
    """Where two fit they are measured; a gradient that is zero is no measurement."""
    model, x = Contrast(), torch.randn(8, 32, 64)
    daf, compressor = compressed(model, math.inf)
    with daf:
        model(x).backward()
    per_example = daf.report.plain_bytes / len(x)
    daf, compressor = compressed(model, examples * per_example / 1e6)
    with daf:
        model(x).backward()
    assert compressor.placement.calibrated == calibrated
    assert ("no gradient" in caplog.text) != calibrated
    assert daf.report.held_bytes_peak <= examples * per_example


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, None, "abc"])
def test_a_metric_must_return_a_number(value):
    model, inputs = build("bert"), batch("bert")
    daf, _ = compressed(model, 0.5, importance=lambda site, probe: value)
    with pytest.raises(ValueError, match=r"importance=.* gave .* must return a finite number"), daf:
        model(**inputs)
    assert hooks_on_stack() is None


def test_a_failed_calibration_is_not_repeated_every_step(caplog):
    model, inputs = build("vit"), batch("vit")
    daf, _ = compressed(model, 0.15, calibrate_at=(0, 3))
    with caplog.at_level(logging.WARNING, "daf_hf"):
        for _ in range(5):
            gradients(model, inputs, daf)
            daf.step()
    assert [r.args[0] for r in caplog.records if "no calibration" in r.msg] == [0, 3]


def test_new_sites_leave_what_is_known_as_it_is():
    model, inputs = build("bert"), batch("bert")
    daf, compressor = compressed(model, 0.5, calibrate_at=(0,), calibration_share=1)
    gradients(model, inputs, daf)
    sites = [s for s in compressor.tracker.sites.values() if s.candidates]
    importances = {site: site.importance for site in sites}
    new = max(sites, key=lambda site: site.nbytes)
    new.importance = new.error_at_zero = None
    compressor.unplanned.add(new)
    daf.step()
    gradients(model, inputs, daf, seed=8)
    assert new.importance is not None and new.importance != importances.pop(new)
    assert all(site.importance == before for site, before in importances.items())


def test_what_is_zero_in_the_first_step_alone_has_bits_for_the_next_ones():
    """DoRA saves LoRA's outputs, which are all zero at first; they were then held exactly."""
    model = lora(build("bert").unload(), ["query", "value"], use_dora=True).train()
    inputs = batch("bert")
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    daf, _ = compressed(model, 0.2, calibrate_at=(0,), calibration_batch=8)
    for step in range(3):
        gradients(model, inputs, daf, seed=step)
        optimizer.step()
        daf.step()
    assert daf.report.predicted_gradient_error < 0.1


@pytest.mark.parametrize("padded", ["masked prompt", "left padding"])
def test_a_loss_on_the_last_tokens_alone(padded):
    """A probe of the first tokens would find no gradient, and leave LoRA's B at zero."""
    model, inputs = build("llama", dropout=0.0), batch("llama", 8, 32)
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][:, :16] = -100
    if padded == "left padding":
        inputs["attention_mask"][:, :16] = 0
    daf, compressor = compressed(model, 0.5)
    gradients(model, inputs, daf)
    inputs_of_a = [
        site
        for site in compressor.tracker.sites.values()
        if "MmBackward0.self" in site.consumers
        and site.candidates  # itself, or what it follows from
    ]
    assert inputs_of_a
    exact = [p for n, p in model.named_parameters() if "lora_B" in n]
    assert all(not p.any() for p in exact)  # it was put back
    assert len({site.importance for site in inputs_of_a}) > 1  # each was measured
    assert all(site.importance > 0 for site in inputs_of_a)


@pytest.mark.parametrize("calibration_batch", [1, 2, 8, 100])
def test_probe_size(calibration_batch):
    model, inputs = build("bert"), batch("bert")
    daf, compressor = compressed(model, 0.6, calibration_batch=calibration_batch)
    gradients(model, inputs, daf)
    assert any(site.importance for site in compressor.tracker.sites.values())
    assert compressor.ledger.peak.held <= 0.6e6


@pytest.mark.parametrize(("examples", "tokens"), [(1, 16), (2, 1), (1, 1), (3, 2)])
def test_small_batches(examples, tokens):
    for name in ("bert", "conv"):
        model, inputs = build(name), batch(name, max(examples, 2 if name == "conv" else 1), tokens)
        daf, compressor = compressed(model, 1.0)
        gradients(model, inputs, daf)
        assert compressor.ledger.peak.held <= 1e6


def test_importances_are_a_moving_average():
    model, inputs = build("bert"), batch("bert")
    values = iter([1.0, 3.0])
    now = [next(values)]
    daf, compressor = compressed(model, 0.5, importance=lambda s, p: now[0], calibrate_at=(0, 1))
    gradients(model, inputs, daf)
    sites = [s for s in compressor.tracker.sites.values() if s.importance]
    assert len(sites) > 10
    assert all(s.importance == pytest.approx(1.0) for s in sites)
    now[0] = next(values)
    daf.step()
    gradients(model, inputs, daf)
    assert all(s.importance == pytest.approx(2.0) for s in sites)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"calibrate_at": (0, 3)}, [0, 3]),
        ({"calibrate_at": (2,), "recalibrate_every": 2, "calibration_share": 1}, [0, 2, 4, 6]),
        ({"calibrate_at": ()}, []),
    ],
)
def test_calibration_steps(options, expected, monkeypatch):
    model, inputs = build("bert"), batch("bert")
    daf, _ = compressed(model, 0.5, **options)
    session, steps = daf._session, []
    calibrate = session._calibrate
    monkeypatch.setattr(
        session,
        "_calibrate",
        lambda *args, **options: (steps.append(session.step), calibrate(*args, **options)),
    )
    for _ in range(8):
        gradients(model, inputs, daf)
        daf.step()
    assert steps == expected


def test_a_probe_that_does_not_fit_is_explained(caplog):
    model, inputs = build("vit"), batch("vit")
    daf, _ = compressed(model, 0.15)
    with caplog.at_level(logging.WARNING, "daf_hf"):
        gradients(model, inputs, daf)
    assert "no calibration at step 0" in caplog.text
    assert "exceed" in caplog.text


def test_without_a_calibration_no_error_is_predicted():
    model, inputs = build("vit"), batch("vit")
    daf, _ = compressed(model, 0.15)
    gradients(model, inputs, daf)
    assert math.isnan(daf.report.predicted_gradient_error)


def test_a_probe_of_few_tokens_is_padded_where_the_batch_is():
    """Without padding attention is given no mask, and saves other tensors."""
    model, inputs = build("llama", dropout=0.0), batch("llama", tokens=64)
    inputs["attention_mask"][:, 60:] = 0
    with compress_activations(model) as daf:
        model(**inputs).loss.backward()
    budget_mb = daf.report.plain_bytes / 16e6  # less than an example
    with compress_activations(model, budget_mb=budget_mb) as daf:
        model(**inputs).loss.backward()
    large = [site for site in daf.report.sites if site.plain_bytes > 4096]
    assert large and all(site.consumer != "unknown" for site in large)


class Norms(nn.Module):
    """Two normalisations, one of them written out, of rows of very different sizes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, input_ids):
        x = self.first(input_ids)
        x = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        y = self.norm(self.second(x) * input_ids[..., :1].abs())
        return {"loss": (y * y.pow(3)).tanh().sum()}


def test_inputs_of_normalisations_are_recognised():
    """Other powers and products are none."""
    torch.manual_seed(0)
    model, inputs = Norms(), {"input_ids": torch.randn(256, 64)}
    daf, compressor = compressed(model, 0.6)
    Calibrates(daf)(model, inputs)
    sites = compressor.tracker.sites.values()
    before, after = (site.consumers for site in sites if site.normalised)
    assert {"PowBackward0.self", "AddmmBackward0.mat1"} <= before
    assert "NativeLayerNormBackward0.input" in after


def test_rows_of_very_different_sizes_are_predicted():
    """A prompt's embeddings are many times as large as a model's own."""
    torch.manual_seed(0)
    model, inputs = build("llama"), batch("llama")
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings[:60] *= 50
    exact = gradients(model, inputs)
    daf, _ = compressed(model, 0.3, calibration_batch=8)
    error = relative_error(gradients(model, inputs, daf), exact)
    assert error <= 1.5 * daf.report.predicted_gradient_error + 0.01


def test_results_of_relu_are_read_for_their_sign():
    """Zero restored as a little more than that would let gradients pass, at whatever width."""
    torch.manual_seed(0)
    model, inputs = build("t5", dropout=0.0), batch("t5")
    exact = gradients(model, inputs)
    daf, compressor = compressed(model, 0.4, calibration_batch=8)
    error = relative_error(gradients(model, inputs, daf), exact)
    assert error <= 1.5 * daf.report.predicted_gradient_error + 0.01
    found = [s for s in compressor.tracker.sites.values() if s.consumer == "ReluBackward0.result"]
    assert found
    assert all(site.option.bits == 1 and site.option.cost == 0 for site in found)


def test_a_fall_is_followed_by_what_a_calibration_holds(monkeypatch):
    """What is measured after it is held within the new budget."""
    model, inputs = build("gpt2"), batch("gpt2", 16, 32)
    daf, compressor = compressed(model, 3.0)
    built = []

    class Built(Graph):
        def __init__(self, *args):
            built.append(0)
            super().__init__(*args)
            if len(built) == 2:  # the pilot was the first
                daf.set_budget(0.3)

        def _first(self, item, tensor):
            found = super()._first(item, tensor)
            if len(built) > 2:
                assert self.nbytes <= 0.3e6 + tensor.nbytes
            return found

    monkeypatch.setattr(calibration, "Graph", Built)
    with daf:
        loss = loss_of(model(**inputs))
    assert len(built) > 2
    assert compressor.arena.held_bytes <= 0.3e6
    loss.backward()
