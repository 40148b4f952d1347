"""Fused attention whose output and row sums are made again from restored queries and keys."""

from __future__ import annotations

import pytest
import torch
from tiny import compressed, gradients, nothing_held, relative_error
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention

from daf_hf import DAFConfig
from daf_hf.attention import Slot
from daf_hf.saved_tensors import Compressor

MODEL = nn.Linear(4, 4)
EXAMPLES, HEADS, TOKENS, SIZE = 2, 4, 24, 16


def compressor(bits, **options):
    return Compressor(MODEL, DAFConfig(budget_mb=10.0, bits=(bits,), **options))


def inputs(scale=1.0, dtype=torch.float32, heads=(HEADS, HEADS, HEADS)):
    """Queries, keys and values, laid out as models lay them out; ``scale`` is of the scores."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(EXAMPLES, TOKENS, count, SIZE, generator=generator)
        .mul_(scale)
        .to(dtype)
        .requires_grad_()
        for count in heads
    ]


def masked(kind):
    mask = torch.zeros(EXAMPLES, 1, TOKENS, TOKENS)
    mask[1, :, :, 15:] = -torch.inf
    return {"attn_mask": mask.expand(-1, HEADS, -1, -1) if kind == "a head" else mask}


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.05},
    "masked": masked("all heads"),
    "masked a head": masked("a head"),
    "masked by booleans": {"attn_mask": masked("all heads")["attn_mask"] == 0},
    "grouped": {"enable_gqa": True},
}


def attend(leaves, call):
    q, k, v = (leaf.transpose(1, 2) * 1 for leaf in leaves)
    return attention(q, k, v, **CALLS[call])


@pytest.mark.parametrize("scale", [1.0, 10.0])
@pytest.mark.parametrize("bits", [1, 2, 8])
@pytest.mark.parametrize("call", CALLS)
def test_gradients_are_those_of_attention_to_what_is_restored(call, bits, scale):
    """Whatever the error of keys and queries; without row sums of their own, weights of scores
    that are far off would be thousands, or infinite.
    """
    heads = (HEADS, 2, 2) if call == "grouped" else (HEADS, HEADS, HEADS)
    leaves = inputs(scale, heads=heads)
    with (daf := compressor(bits)).scope():
        out = attend(leaves, call)
    node = out.grad_fn
    assert node.name() == "ScaledDotProductFlashAttentionForCpuBackward0"
    assert isinstance(node._raw_saved_output.data.physical, Slot)
    assert isinstance(node._raw_saved_logsumexp.data.physical, Slot)
    restored = [
        saved.clone().requires_grad_()
        for saved in (node._saved_query, node._saved_key, node._saved_value)
    ]
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    options = dict(CALLS[call])
    expected = torch.autograd.grad(attention(*restored, **options), restored, gradient)
    del node
    found = torch.autograd.grad(out, leaves, gradient)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs.transpose(1, 2))
    del out
    assert nothing_held(daf)


def test_nothing_is_held_of_output_and_sums():
    leaves = inputs()
    with (daf := compressor(8)).scope():
        out = attend(leaves, "plain")
    daf.placement.settle()
    assert daf.arena.outside_bytes == 0
    assert len(daf.arena) == 3
    out.sum().backward()


def test_an_output_that_others_save_is_made_again_for_them_too():
    leaves = inputs()
    weight = torch.randn(HEADS * SIZE, 8, requires_grad=True)
    with (daf := compressor(8)).scope():
        out = attend(leaves, "causal")
        y = out.transpose(1, 2).reshape(EXAMPLES * TOKENS, -1) @ weight
    assert len(daf.arena) == 3
    y.square().sum().backward(retain_graph=True)
    once = [leaf.grad.clone() for leaf in leaves]
    exact = attend([leaf.detach() for leaf in leaves], "causal")
    expected = exact.transpose(1, 2).reshape(EXAMPLES * TOKENS, -1)
    expected = expected.T @ (2 * y.detach())
    assert float((weight.grad - expected).norm() / expected.norm()) < 0.02
    y.square().sum().backward()  # nothing of the first pass is left to be read in the second
    assert all(torch.equal(leaf.grad, 2 * g) for leaf, g in zip(leaves, once, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    leaves = inputs(dtype=dtype)
    with (daf := compressor(8)).scope():
        out = attend(leaves, "causal")
    found = torch.autograd.grad(out.float().square().sum(), leaves)
    with torch.enable_grad():
        expected = torch.autograd.grad(attend(leaves, "causal").float().square().sum(), leaves)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).float().norm() / theirs.float().norm()) < 0.05
    assert nothing_held(daf)


def test_it_is_stored_where_nothing_may_be_derived():
    leaves = inputs()
    with (daf := compressor(8, derive=False)).scope():
        out = attend(leaves, "plain")
    assert len(daf.arena) == 4 and daf.arena.outside_bytes > 0
    out.sum().backward()


def test_a_change_in_place_raises():
    leaves = inputs()
    with compressor(8).scope():
        q, k, v = (leaf.transpose(1, 2) * 1 for leaf in leaves)
        out = attention(q, k, v)
    k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_few_queries_of_many_keys():
    """However small output and sums are: they go with the keys that are restored."""
    q, k, v = inputs(10.0)
    leaves = [q.detach()[:, :1].requires_grad_(), k, v]
    with compressor(1).scope():
        out = attend(leaves, "plain")
    assert out.numel() * 4 < 4096
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert all(bool(g.isfinite().all()) and float(g.abs().max()) < 1e3 for g in gradients)


@pytest.mark.parametrize("read", range(1, 9))
def test_a_budget_that_falls_while_the_node_reads(read):
    """All that it reads is of one moment: no sums of other keys than it multiplies with."""
    leaves = inputs(10.0)
    daf = Compressor(MODEL, DAFConfig(budget_mb=10.0, bits=(1, 2, 3, 4, 5, 6, 7, 8)))
    with daf.scope():
        out = attend(leaves, "causal")
    decode, count = daf.placement.decode, 0

    def falling(*args):
        nonlocal count
        count += 1
        if count == read:
            daf.set_limit(daf.arena.held_bytes * 0.4)
        return decode(*args)

    for place in [reference() for reference in daf._physicals.values()]:
        if hasattr(place, "decode"):
            place.decode = falling
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert count == 3
    assert all(bool(g.isfinite().all()) and float(g.abs().max()) < 1e3 for g in gradients)


def test_looking_at_a_node_keeps_nothing():
    leaves = inputs()
    with compressor(8).scope():
        out = attend(leaves, "plain")
    call = out.grad_fn._raw_saved_logsumexp.data.physical.call
    assert out.grad_fn._saved_logsumexp.shape == (EXAMPLES, HEADS, TOKENS)
    assert not call._held
    out.sum().backward()
    assert not call._held


@pytest.mark.parametrize("what", ["cast", "multiple"])
def test_what_others_make_of_the_output_is_stored(what):
    """Nothing would confirm in a step that it still is what it was made of."""
    leaves, weight = inputs(), torch.randn(SIZE, 8, requires_grad=True)
    with (daf := compressor(8)).scope():
        out = attend(leaves, "plain")
        made = out.bfloat16() if what == "cast" else out * 2.0
        made.data.mul_(3)
        (made.float() if what == "cast" else made).pow(2).matmul(weight).sum().backward()
    exact = attend([leaf.detach() for leaf in leaves], "plain")
    made = 3 * (exact.bfloat16().float() if what == "cast" else exact * 2.0)
    expected = made.pow(2).sum((0, 1, 2))[:, None].expand(-1, 8)
    assert float((weight.grad - expected).norm() / expected.norm()) < 0.05
    assert not daf.ledger.counts.get("doubted")


class Attending(nn.Module):
    """Attention whose scores are large, of some queries to all tokens."""

    def __init__(self, queries):
        super().__init__()
        self.queries, width = queries, 32
        self.embed = nn.Embedding(50, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        with torch.no_grad():
            self.q.weight.mul_(6.0)
            self.k.weight.mul_(6.0)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        q, k, v = (
            f(x).unflatten(-1, (2, 16)).transpose(1, 2) * 1 for f in (self.q, self.k, self.v)
        )
        out = attention(q[:, :, : self.queries] * 1, k, v)
        return {"loss": self.o(out.transpose(1, 2).flatten(2)).tanh().mean(1).square().sum()}


@pytest.mark.parametrize(("queries", "tokens", "budget_mb"), [(1, 512, 0.2), (1100, 1100, 0.35)])
def test_errors_are_as_predicted_whatever_the_sizes(queries, tokens, budget_mb):
    """A pilot has fewer tokens: what holds for its few must hold for all."""
    torch.manual_seed(0)
    model = Attending(queries)
    inputs = {"input_ids": torch.randint(0, 50, (2, tokens))}
    exact = gradients(model, inputs)
    daf, compressor = compressed(model, budget_mb, bits=(0, 1, 2, 3, 4))
    for _ in range(2):
        error = relative_error(gradients(model, inputs, daf), exact)
        assert error < 2 * daf.report.predicted_gradient_error
    assert not compressor.ledger.counts.get("doubted")
