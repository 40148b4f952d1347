"""A wrapped forward: seen while it lasts, no copy of the model's, and gone without a trace."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import types
import weakref

import pytest
import torch
from tiny import compressed, loss_of
from torch import nn

from daf_hf import DAFConfig
from daf_hf.forward import wrap_forward
from daf_hf.session import Session


class Notes:
    """Notes what it sees of a model."""

    def __init__(self):
        self.installed = True
        self.seen = []

    def begin_pass(self, original, inputs):
        self.seen.append(inputs)
        return len(self.seen)

    def end_pass(self, current, completed):
        self.seen.append((current, completed))


class Model(nn.Module):
    def forward(self, x, scale=1):
        return x.reshape(2) * scale


def test_passes_are_seen_with_their_inputs_and_how_they_ended():
    model, notes = Model(), Notes()
    restore = wrap_forward(model, notes)
    x = torch.ones(2)
    assert torch.equal(model(x, scale=3), torch.full((2,), 3.0))
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(3))
    (given, scale), first, _, second = notes.seen
    assert given == (x,) and scale == {"scale": 3}
    assert (first, second) == ((1, True), (3, False))
    restore()
    assert "forward" not in model.__dict__
    model(x)
    assert len(notes.seen) == 4


def test_nothing_is_seen_without_gradients_or_when_it_is_not_to_be():
    model, notes = Model(), Notes()
    wrap_forward(model, notes)
    with torch.no_grad():
        model(torch.ones(2))
    notes.installed = False
    model(torch.ones(2))
    assert notes.seen == []


class Runs(Notes):
    """Runs the model itself before each pass, as a calibration does."""

    def begin_pass(self, original, inputs):
        original(*inputs[0], **inputs[1])
        torch.ones(2).sin().cos()  # not the model's, and not to be compiled
        return super().begin_pass(original, inputs)


@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_compiled_is_compiled_for_those_who_watch(in_place):
    """And nothing of theirs is; without a compiler nothing is compiled."""
    compiled, run = [], []

    def backend(graph, inputs):
        compiled.append([node.target for node in graph.graph.nodes if node.op != "output"])
        return lambda *args: run.append(1) or graph(*args)

    torch._dynamo.reset()
    model, notes = Model(), Runs()
    wrap_forward(model, notes)
    model(torch.zeros(2, 1))
    assert not compiled
    if in_place:
        model.compile(backend=backend)
    call = model if in_place else torch.compile(model, backend=backend)
    for _ in range(3):
        call(torch.zeros(2, 1))
    assert len(compiled) == 1
    assert len(run) == 6
    model.forward(torch.zeros(2, 1))
    assert len(run) == 6
    torch._dynamo.reset()


def test_who_watches_is_not_kept_alive():
    model, notes = Model(), Notes()
    wrap_forward(model, notes)
    gone = weakref.ref(notes)
    del notes
    gc.collect()
    assert gone() is None
    assert torch.equal(model(torch.ones(2)), torch.ones(2))


def test_a_forward_of_the_models_own_comes_back():
    model = Model()
    model.forward = own = types.MethodType(Model.forward, model)
    wrap_forward(model, Notes())()
    assert model.__dict__["forward"] is own


def test_a_forward_wrapped_by_others_stays_wrapped(bert_model, bert_batch):
    plain = bert_model.forward

    def theirs(*args, **kwargs):
        return plain(*args, **kwargs)

    bert_model.forward = theirs
    session = Session(bert_model, DAFConfig(budget_mb=0.5))
    session.install()
    ours = bert_model.forward

    def outer(*args, **kwargs):
        return ours(*args, **kwargs)

    bert_model.forward = outer
    session.remove()
    assert bert_model.forward is outer
    loss_of(bert_model(**bert_batch)).backward()
    assert session.compressor.ledger.peak.held == 0


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, lambda m: copy.deepcopy(pickled(m))])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "own forward"])
def test_a_copy_of_the_model_is_its_own(bert_model, bert_batch, copied, wrapped):
    """A copy made inside runs on its own weights, uncompressed, then and later."""
    if wrapped:
        bert_model.forward = types.MethodType(type(bert_model).forward, bert_model)
    bert_model.eval()  # no dropout
    daf, compressor = compressed(bert_model, 0.5)
    with daf:
        twin = copied(bert_model)
        before = loss_of(bert_model(**bert_batch)).detach()
        with torch.no_grad():
            for parameter in bert_model.parameters():
                parameter.mul_(2)
            assert torch.equal(loss_of(twin(**bert_batch)), before)
    compressor.ledger.peak.held = 0
    loss_of(twin(**bert_batch)).backward()
    assert compressor.ledger.peak.held == 0
    assert all(p.grad is None for p in bert_model.parameters())
    assert any(p.grad is not None for p in twin.parameters())
    assert inspect.signature(twin.forward) == inspect.signature(bert_model.forward)


def test_an_average_of_the_model_is_its_own(bert_model, bert_batch):
    daf, _ = compressed(bert_model.eval(), 0.5)
    with daf:
        average = torch.optim.swa_utils.AveragedModel(bert_model)
        before = loss_of(average(**bert_batch)).detach()
        with torch.no_grad():
            for parameter in bert_model.parameters():
                parameter.mul_(2)
    assert torch.equal(loss_of(average(**bert_batch)), before)


def test_the_signature_of_forward_stays(bert_model):
    before = inspect.signature(bert_model.forward)
    daf, _ = compressed(bert_model, 0.5)
    with daf:
        assert inspect.signature(bert_model.forward) == before
