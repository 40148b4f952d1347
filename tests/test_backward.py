"""Parts of a backward pass, and those that ``torch.autograd.grad`` cannot run."""

from __future__ import annotations

import pytest
import torch
from tiny import compressed, gradients, relative_error
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import checkpoint

from daf_hf.backward import gradients_of


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return nn.Linear(8, 8), nn.Linear(8, 8)


def loss_of(layers, reentrant):
    x = torch.ones(4, 8, requires_grad=True)
    hidden = checkpoint(layers[0], x, use_reentrant=reentrant)
    return layers[1](hidden).square().sum(), hidden, x


def test_reentrant_checkpoints_by_backward(layers):
    """Gradients are those of ``torch.autograd.grad``, of edges too, however often."""
    parameters = [p for layer in layers for p in layer.parameters()]
    expected = torch.autograd.grad(loss_of(layers, False)[0], parameters)
    loss, hidden, x = loss_of(layers, True)
    assert gradients_of([loss], parameters, None)[0] is None  # it does not look into the region
    with pytest.raises(RuntimeError, match="use_reentrant"):
        gradients_of([loss], [x], None)
    for _ in range(2):
        found = gradients_of([loss], parameters, None, [x])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    edge = GradientEdge(hidden.grad_fn, 0)
    below = gradients_of([edge], parameters, [torch.ones_like(hidden)], [x])
    assert torch.equal(below[1], torch.full((8,), 4.0)) and below[2] is None


def test_nothing_of_it_is_left(layers):
    """Neither gradients, nor hooks that have run, nor hooks that are gone."""
    parameters = [p for layer in layers for p in layer.parameters()]
    loss, _, x = loss_of(layers, True)
    ran, before = [], torch.ones(8, 8)
    layers[0].weight.grad = before
    layers[0].weight.register_post_accumulate_grad_hook(ran.append)
    gradients_of([loss], [layers[1].weight], None, [x, *parameters])
    assert layers[0].weight.grad is before and bool((before == 1).all())
    assert x.grad is None and layers[1].weight.grad is None
    assert not ran
    loss.backward()
    assert len(ran) == 1 and not torch.equal(layers[0].weight.grad, torch.ones(8, 8))


class Sparse(nn.Module):
    """Gradients of an embedding that are sparse, and a weight that is."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32, sparse=True)
        self.values = nn.Parameter(torch.randn(32))
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, input_ids):
        diagonal = torch.arange(32).expand(2, 32)
        weight = torch.sparse_coo_tensor(diagonal, self.values, (32, 32), check_invariants=False)
        hidden = torch.tanh(self.first(self.embedding(input_ids)))
        hidden = torch.sparse.mm(weight, hidden.view(-1, 32).t()).t()
        return {"loss": torch.tanh(self.last(hidden)).square().mean()}


def test_gradients_that_are_sparse_are_measured():
    torch.manual_seed(0)
    model, tokens = Sparse(), {"input_ids": torch.randint(64, (8, 16))}
    exact = gradients(model, tokens)
    daf, compressor = compressed(model, 0.03)
    found = gradients(model, tokens, daf)
    assert compressor.placement.calibrated
    assert found["embedding.weight"].is_sparse
    dense = [
        {name: g.to_dense() if g.is_sparse else g for name, g in each.items()}
        for each in (found, exact)
    ]
    error = relative_error(*dense)
    assert 0 < error <= 1.5 * daf.report.predicted_gradient_error + 0.01
