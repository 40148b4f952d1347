"""Checkpointed regions: their inputs, and calibration on graphs that hold them."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from tiny import Reads, batch, build, checkpointing, compressed, gradients, nothing_held, same
from torch import nn
from torch.utils import checkpoint as _checkpoint
from torch.utils.checkpoint import (
    CheckpointError,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from daf_hf import BudgetError
from daf_hf.checkpointed import repeatable, runs_again, saves_inputs

KINDS = pytest.mark.parametrize("reentrant", [True, False])
LOW = {"bits": (2,), "derive": False}
TIGHT = 0.024
"""MB: not enough for the region's input of 16 KB, kept exactly."""


class Region(nn.Module):
    """A layer that is run again in backward, between two that are not."""

    def __init__(self, reentrant, width=64):
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(width, width) for _ in range(3))
        self.reentrant = reentrant
        self.runs = 0

    def run(self, x):
        self.runs += 1
        return nn.functional.gelu(self.inner(x))

    def forward(self, x):
        x = nn.functional.gelu(self.first(x))
        self.seen = x
        x = checkpoint(self.run, x, use_reentrant=self.reentrant)
        return {"loss": self.last(nn.functional.gelu(x)).square().mean()}


def region(reentrant):
    torch.manual_seed(0)
    return Region(reentrant).train(), torch.randn(64, 64)


def run(model, x, budget_mb=0.04, **options):
    """The compressor after a forward pass, and what it packed of the region's input."""
    daf, compressor = compressed(model, budget_mb, **options)
    handles, save = [], compressor._save

    def saving(tensor, frame):
        handle = save(tensor, frame)
        if saves_inputs(frame):
            handles.append(handle)
        return handle

    compressor._save = saving
    with daf:
        loss = model(x)["loss"]
    return loss, compressor, handles


@KINDS
def test_inputs_are_exact_by_default(reentrant):
    model, x = region(reentrant)
    loss, compressor, handles = run(model, x, **LOW)
    (handle,) = handles
    assert torch.equal(handle.restore(), model.seen)
    low = [s for s in compressor.tracker.sites.values() if s.placed[1] == 2]
    assert len(low) > 2  # all others are in the 2 bits allowed
    del handle
    handles.clear()
    loss.backward()


@KINDS
def test_inputs_in_8_bits(reentrant):
    """No fewer, although fewer are allowed, and demoted to no fewer."""
    model, x = region(reentrant)
    loss, compressor, handles = run(model, x, TIGHT, **LOW, checkpoint_inputs=8)
    (handle,) = handles
    error = (handle.restore() - model.seen).abs().max() / (model.seen.max() - model.seen.min())
    assert 0 < error < 1 / 200
    (site,) = [s for s in compressor.tracker.sites.values() if s.least_bits]
    assert site.placed[1] == 8
    assert not compressor.set_limit(1.0)
    assert handle.physical.stored.bits == 8
    assert site.name.startswith("model/")
    loss.backward()


@KINDS
def test_without_a_budget_8_bits_are_exact(reentrant):
    model, x = region(reentrant)
    expected = gradients(model, {"x": x})
    daf, _ = compressed(model, math.inf, checkpoint_inputs=8)
    assert same(gradients(model, {"x": x}, daf), expected)


@KINDS
def test_the_error_names_the_way_out(reentrant):
    model, x = region(reentrant)
    with pytest.raises(BudgetError, match="checkpoint_inputs=8"):
        run(model, x, TIGHT, **LOW)
    assert not run(model, x, TIGHT, **LOW, checkpoint_inputs=8)[1].placement.refusal


class CheckpointFunction(torch.autograd.Function):
    """Another library's."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].exp()


def test_functions_of_other_libraries():
    x = torch.randn(4, requires_grad=True)
    found = []

    def pack(tensor):
        found.append(saves_inputs(sys._getframe(1)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        theirs = CheckpointFunction.apply(x)
        ordinary = Reads.apply(x, [], x)
        product = x * x
    assert found == [True, False, False, False]
    assert runs_again(theirs.grad_fn)
    assert not runs_again(ordinary.grad_fn) and not runs_again(product.grad_fn)


def test_selective_checkpoints_are_repeatable_inside():
    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    def loss():
        y = checkpoint(lambda x: (x @ x).exp() @ x, x, use_reentrant=False, context_fn=contexts)
        return y.sum()

    x = torch.randn(4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(), x)
    with repeatable():
        inside = loss()
    for _ in range(2):
        (found,) = torch.autograd.grad(inside, x, retain_graph=True)
        assert torch.equal(found, expected)
    outside = loss()
    torch.autograd.grad(outside, x, retain_graph=True)
    with pytest.raises((RuntimeError, CheckpointError), match="extra time"):
        torch.autograd.grad(outside, x)


def test_selective_checkpoints_are_as_before_whichever_thread_leaves_last():
    before = _checkpoint._checkpoint_without_reentrant_generator
    first, second = repeatable(), repeatable()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert _checkpoint._checkpoint_without_reentrant_generator is before


@KINDS
def test_calibration_measures(reentrant):
    """Reentrant checkpoints can be run by ``backward()`` alone; nobody's gradients change by it."""
    model, inputs = build("bert"), batch("bert")
    checkpointing(model, reentrant)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    ran = []
    trained[0].register_post_accumulate_grad_hook(ran.append)
    daf, compressor = compressed(model, 0.2, checkpoint_inputs=8)
    with daf:
        loss = model(**inputs).loss
    assert compressor.placement.calibrated and not ran
    assert all(bool((p.grad == 1).all()) for p in trained)
    (first, *_) = [s for s in compressor.tracker.sites.values() if s.least_bits == 8]
    assert first.importance is not None and first.importance > 0
    loss.backward()
    assert ran
    del loss
    assert nothing_held(compressor)


def test_looking_for_readers_runs_no_region_again():
    model, x = region(False)
    daf, compressor = compressed(model, 1.0, calibrate_at=(0,))
    with daf:
        model(x)
    # Pilot, survey, probe, the pass itself; the region again once for each gradient that is taken.
    sites = [s for s in compressor.tracker.sites.values() if s.importance is not None]
    assert model.runs <= 4 + 2 + 2 * len(sites)


@KINDS
def test_a_model_in_a_checkpoint(reentrant):
    """Its forward pass is compressed, be it the first or that in backward, in every step alike."""
    model, inputs = build("bert", 0.0), batch("bert")
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    daf, compressor = compressed(model, 0.4, calibrate_at=(0,))

    def loss(embeddings):
        return model(inputs_embeds=embeddings, **inputs).loss

    for _ in range(4):
        with daf:
            checkpoint(loss, embeddings, use_reentrant=reentrant).backward()
        daf.step()
        assert nothing_held(compressor)
    assert daf._session.planner._overlap == 1
    assert 0 < daf.report.held_bytes_peak <= 0.4e6
    assert not daf.report.counts.get("spilled")
