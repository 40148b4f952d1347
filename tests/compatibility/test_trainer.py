"""Runs of a Trainer that begin more than once, and what is trained changing in mid-run."""

from __future__ import annotations

import gc
import math

import peft
import pytest
import torch
from cases_trainer import Examples
from peft import LoraConfig
from tiny import (
    batch,
    build,
    gradients,
    hooks_on_stack,
    nothing_held,
    relative_error,
    same,
    weights,
)
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from daf_hf import DAFCallback, attach, compress_activations

AREA = "Trainer"
BUDGET = {"budget_mb": 0.5, "calibrate_at": (0,)}


def trainer_of(path, callbacks=(), model=None, **options):
    """A Trainer of the tiny RoBERTa."""
    given = {
        key: options.pop(key)
        for key in ("eval_dataset", "model_init", "compute_metrics")
        if key in options
    }
    values = {
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    set_seed(0)
    if "model_init" not in given:
        model = model or build("roberta")
    arguments = TrainingArguments(str(path), **values)
    data = Examples("roberta")
    return Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks), **given)


def is_plain(model):
    """Whether nothing of daf_hf is left."""
    gc.collect()
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return hooks_on_stack() is None and "forward" not in model.__dict__ and not hooked


class FillsMemory(TrainerCallback):
    """Says that there is no memory, in a forward pass of more than so many examples."""

    handle = None

    def __init__(self, most):
        self.most = most

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if self.handle is not None:
            self.handle.remove()
        self.handle = model.get_input_embeddings().register_forward_hook(self.see)

    def on_train_end(self, *args, **kwargs):
        self.handle.remove()

    def see(self, module, inputs, output):
        if len(inputs[0]) > self.most:
            raise RuntimeError("CUDA out of memory.")


@pytest.mark.supports(AREA, "`auto_find_batch_size`")
@pytest.mark.parametrize("attached", [False, True])
def test_a_smaller_batch_after_running_out_of_memory(attached, tmp_path):
    """The first attempt leaves nothing behind; the second calibrates for its own batches."""
    trainer = trainer_of(
        tmp_path, [FillsMemory(5)], auto_find_batch_size=True, per_device_train_batch_size=8
    )
    daf = attach(trainer, **BUDGET) if attached else DAFCallback(**BUDGET)
    if not attached:
        trainer.add_callback(daf)
    sizes = []

    class Watching(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            session = daf._session
            gc.collect()
            assert nothing_held(session.compressor)
            probed = [s.probed for s in session.compressor.tracker.sites.values() if s.probed]
            sizes.extend({p.batch.examples for p in probed})

    trainer.add_callback(Watching())
    trainer.train()
    assert set(sizes) == {trainer._train_batch_size}
    assert trainer._train_batch_size <= 5
    assert 0 < daf.report.held_bytes_peak <= BUDGET["budget_mb"] * 1e6
    assert is_plain(trainer.model)


@pytest.mark.supports(AREA, "early stopping, `load_best_model_at_end`")
def test_early_stopping_and_the_best_model(tmp_path):
    """Without a budget the best model is plain training's."""
    found = []
    for daf in (None, DAFCallback(), DAFCallback(**BUDGET)):
        stopping = EarlyStoppingCallback(1)
        trainer = trainer_of(
            tmp_path / str(len(found)),
            [stopping] if daf is None else [stopping, daf],
            max_steps=12,
            learning_rate=0.3,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=1,
            load_best_model_at_end=True,
            eval_dataset=Examples("roberta", 8),
        )
        trainer.train()
        found.append((trainer.state.global_step, weights(trainer.model)))
        assert trainer.state.best_model_checkpoint is not None
        assert is_plain(trainer.model)
    assert found[0][0] == found[1][0] < 12
    assert same(found[0][1], found[1][1])


@pytest.mark.supports(AREA, "several runs in one process, `model_init`")
@pytest.mark.parametrize("attached", [False, True])
def test_every_trial_has_a_model_of_its_own(attached, tmp_path):
    """As a search for hyper-parameters does; the same callback serves them all."""
    trainer = trainer_of(tmp_path, model_init=lambda: build("roberta"))
    daf = attach(trainer, **BUDGET) if attached else DAFCallback(**BUDGET)
    if not attached:
        trainer.add_callback(daf)
    models, outcomes = [], []
    for rate in (1e-2, 1e-2, 1e-3):
        trainer.args.learning_rate = rate
        trainer.train()
        models.append(trainer.model)
        outcomes.append(weights(trainer.model))
        assert 0 < daf.report.held_bytes_peak <= BUDGET["budget_mb"] * 1e6
    assert len({id(model) for model in models}) == 3
    assert all(is_plain(model) for model in models)
    assert same(outcomes[0], outcomes[1])
    assert not same(outcomes[0], outcomes[2])


@pytest.mark.supports(AREA, "two models, trained in turn")
def test_two_models_in_turn():
    names = ("roberta", "llama")
    exact, models = {}, {}
    for name in names:
        models[name] = build(name)
        exact[name] = gradients(models[name], batch(name))
    scopes = {
        name: compress_activations(models[name], calibration_batch=64, **BUDGET) for name in names
    }
    for _ in range(2):
        for name in names:
            found = gradients(models[name], batch(name), scopes[name])
            daf = scopes[name]
            error = relative_error(found, exact[name])
            assert error <= 1.5 * daf.report.predicted_gradient_error + 0.01
            assert daf.report.held_bytes_peak <= BUDGET["budget_mb"] * 1e6
            assert nothing_held(daf._session.compressor)
            daf.step()


def two_adapters():
    """A model with two adapters, on other layers."""
    model = build("llama")
    model.add_adapter("other", LoraConfig(r=4, target_modules=["k_proj", "up_proj"]))
    return model


def switch_adapter(model):
    model.set_adapter("other")


def unfreeze(model):
    """Train all of the last layer, and its first layer's adapter no longer."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".layers.1." in name


def add_adapter(model):
    model.add_adapter("third", LoraConfig(r=4, target_modules=["down_proj"]))
    model.set_adapter("third")


@pytest.mark.supports("PEFT", "what is trained changes in mid-training")
@pytest.mark.parametrize("change", [switch_adapter, unfreeze, add_adapter])
@pytest.mark.parametrize("share", [math.inf, 0.4])
def test_what_is_trained_changes(change, share):
    """The first step after it is exact without a budget, and as predicted under one."""
    torch.manual_seed(0)
    model, inputs = two_adapters(), batch("llama")
    whole = compress_activations(model)
    gradients(model, inputs, whole)
    budget = share * whole.report.plain_bytes
    daf = compress_activations(
        model, budget_mb=budget / 1e6, calibrate_at=(0,), calibration_batch=64
    )
    gradients(model, inputs, daf)
    daf.step()
    change(model)
    exact = gradients(model, inputs)
    found = gradients(model, inputs, daf)
    if math.isinf(share):
        assert same(found, exact)
    else:
        error = relative_error(found, exact)
        assert error <= 1.5 * daf.report.predicted_gradient_error + 0.01
        assert daf.report.held_bytes_peak <= budget
    assert nothing_held(daf._session.compressor)
    assert is_plain(model)


@pytest.mark.supports("PEFT", "two adapters at once, of two kinds")
@pytest.mark.parametrize("share", [math.inf, 0.4])
def test_mixed_adapters(share):
    torch.manual_seed(0)
    base = build("llama").unload()
    model = peft.PeftMixedModel(base, LoraConfig(r=4, target_modules=["q_proj"]))
    model.add_adapter("other", peft.LoHaConfig(r=4, target_modules=["v_proj"]))
    model.set_adapter(["default", "other"])
    model.train()
    inputs = batch("llama")
    exact = gradients(model, inputs)
    whole = compress_activations(model)
    assert same(gradients(model, inputs, whole), exact)
    budget = share * whole.report.plain_bytes
    daf = compress_activations(model, budget_mb=budget / 1e6, calibration_batch=64)
    error = relative_error(gradients(model, inputs, daf), exact)
    assert error <= 1.5 * daf.report.predicted_gradient_error + 0.01
    assert nothing_held(daf._session.compressor)
