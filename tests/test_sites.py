"""Save sites: their names, keys and how sizes are predicted."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import batch, build, compressed, gradients
from torch import nn

from daf_hf import compress_activations
from daf_hf.sites import (
    DIM_BATCH,
    DIM_BOTH,
    DIM_CONSTANT,
    DIM_TOKENS,
    Batch,
    Probed,
    SiteTracker,
    dimension_roles,
)

sizes = st.integers(1, 50)


@given(sizes, sizes, sizes, sizes, st.integers(2, 64), st.integers(1, 4))
def test_roles_predict_sizes(examples, tokens, more_examples, more_tokens, width, heads):
    """Whatever two sizes the roles are learnt from, a third is predicted."""
    batches = (Batch(2, 3), Batch(3, 5))

    def shape(b):
        return (b.examples * b.tokens, b.examples, heads, b.tokens, width * 101)

    roles = dimension_roles(shape(batches[0]), shape(batches[1]), batches)
    assert roles == (DIM_BOTH, DIM_BATCH, DIM_CONSTANT, DIM_TOKENS, DIM_CONSTANT)
    probe, target = Batch(examples, tokens), Batch(more_examples, more_tokens)
    numel = torch.Size(shape(probe)).numel()
    probed = Probed(probe, shape(probe), roles, numel, (4,), 1, 1.0, 1.0)
    assert probed.predict(target) == (torch.Size(shape(target)).numel(), width * 101)


def test_another_number_of_dimensions_is_constant():
    assert dimension_roles((2, 3), (3,), (Batch(2), Batch(3))) == (DIM_CONSTANT,)


class Shared(nn.Module):
    """One layer called twice, and operations of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        y = self.layer(self.layer(x).relu()).sigmoid()
        return {"loss": (y * y.tanh()).mean()}


def sites_of(model, inputs, budget=5.0, **options):
    daf, compressor = compressed(model, budget, **options)
    gradients(model, inputs, daf)
    return compressor.tracker.sites


def test_names_are_unique_and_stable():
    names = []
    for seed in (0, 1):
        sites = sites_of(build("bert", seed=seed), batch("bert", seed=seed))
        names.append([site.name for site in sites.values()])
        assert len(set(names[-1])) == len(names[-1])
    assert names[0] == names[1]
    assert any(name.startswith("base_model.model.bert.encoder.layer.1.") for name in names[0])


def test_sites_do_not_depend_on_sizes():
    model = build("bert")
    daf, compressor = compressed(model, 5.0)
    counts = []
    for examples, tokens in ((8, 16), (2, 9), (1, 30), (16, 1)):
        gradients(model, batch("bert", examples, tokens), daf)
        counts.append(len(compressor.tracker.sites))
    assert len(set(counts)) == 1


def test_a_site_knows_whether_its_module_trains():
    model = build("bert")
    daf, compressor = compressed(model, 5.0)
    gradients(model, batch("bert"), daf)
    training = set(compressor.tracker.sites.values())
    gradients(model.eval(), batch("bert"), daf)
    evaluating = set(compressor.tracker.sites.values()) - training
    assert evaluating
    assert not {s.name for s in training} & {s.name for s in evaluating}


def test_calls_of_a_shared_module_have_one_site():
    model = Shared()
    sites = sites_of(model, {"x": torch.randn(64, 64)})
    assert len([s for s in sites.values() if s.module == "layer"]) <= 2
    assert len([s for s in sites.values() if s.module == ""]) >= 3


class Lends(nn.Module):
    """Another module calls its layer too, as DoRA does with LoRA's matrices."""

    class Borrower(nn.Module):
        def forward(self, layer):
            return layer(torch.eye(64))

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.borrower = self.Borrower()

    def forward(self, x):
        norm = self.borrower(self.layer).norm()
        return {"loss": (self.layer(x) / norm).square().mean()}


def test_calls_by_different_modules_have_sites_of_their_own():
    sites = sites_of(Lends(), {"x": torch.randn(128, 64)}).values()
    saved = {site.shape for site in sites if site.module == "layer"}
    assert saved == {(128, 64), (64, 64)}


def test_consumers_are_learnt():
    model = Shared()
    daf, compressor = compressed(model, 0.1)
    gradients(model, {"x": torch.randn(128, 64)}, daf)
    consumers = {c for s in compressor.tracker.sites.values() for c in s.consumers}
    assert {"ReluBackward0.result", "SigmoidBackward0.result", "TanhBackward0.result"} <= consumers
    assert any(c.startswith("AddmmBackward0.") for c in consumers)


def test_patterns():
    model = build("bert")
    tracker = SiteTracker(model, ("*.layer.0.*", "*.classifier*"), ("*.attention.*",))
    assert tracker._add((1,), "bert.encoder.layer.0.output").compressible
    assert not tracker._add((2,), "bert.encoder.layer.1.output").compressible
    assert not tracker._add((3,), "bert.encoder.layer.0.attention.self").compressible


def test_an_exception_in_a_module_does_not_confuse_the_next_call():
    model = Shared()
    tracker = SiteTracker(model)
    tracker.install()
    calls = tracker.start()
    with pytest.raises(RuntimeError):
        model.layer(torch.ones(3, 3))
    assert tracker.current_module() is model
    tracker.finish(calls)
    tracker.remove()
    assert not model.layer._forward_hooks


def test_a_model_is_followed_anew_by_the_same_hooks():
    """Compiled models are guarded by hooks' ids."""
    model = Shared()
    tracker = SiteTracker(model)
    tracker.install()
    first = dict(model.layer._forward_hooks), dict(model.layer._forward_pre_hooks)
    assert all(first)
    tracker.remove()
    assert not any(vars(model.layer)[name] for name in vars(model.layer) if "_hooks" in name)
    tracker.install()
    assert (dict(model.layer._forward_hooks), dict(model.layer._forward_pre_hooks)) == first
    assert set(model.layer._forward_hooks_always_called) == set(first[0])
    tracker.remove()
    assert not any(vars(model.layer)[name] for name in vars(model.layer) if "_hooks" in name)


def test_a_followed_model_can_be_copied_and_pickled():
    model = Shared()
    tracker = SiteTracker(model)
    tracker.install()
    twin = copy.deepcopy(model)
    x = torch.ones(2, 64)
    expected = model(x)["loss"]
    assert torch.equal(twin(x)["loss"], expected)
    tracker.remove()
    assert torch.equal(pickle.loads(pickle.dumps(model))(x)["loss"], expected)


class Attention(nn.Module):
    """Attention to frozen keys, with or without a mask."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(16, 16)

    def forward(self, x, mask=None):
        split = [y.view(*x.shape[:2], 2, 8).transpose(1, 2) for y in (self.query(x), x)]
        out = nn.functional.scaled_dot_product_attention(split[0], split[1], split[1], mask)
        return {"loss": out.square().mean()}


class Around(nn.Module):
    """A model of one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        return self.layer(*args)


def test_a_mask_that_comes_and_goes_shifts_no_key():
    model, x = Around(Attention()), torch.randn(4, 32, 16)
    shapes = []
    with compress_activations(model) as daf:
        for mask in (None, torch.zeros(4, 1, 32, 32), None):
            model(x, mask)["loss"].backward()
            shapes.append({site.name: site.shape for site in daf.report.sites})
    assert (4, 2, 32, 8) in shapes[0].values()
    assert shapes[1] == {**shapes[0], **{n: (4, 1, 32, 32) for n in shapes[1].keys() - shapes[0]}}
    assert len(shapes[1]) == len(shapes[0]) + 1
    assert shapes[2] == shapes[1]
