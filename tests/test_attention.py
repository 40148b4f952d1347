"""Fused attention whose output and row sums are made again from restored queries and keys."""

from __future__ import annotations

import pytest
import torch
from tiny import nothing_held
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention

from daf_hf import DAFConfig
from daf_hf.physical import Derived
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
    assert isinstance(node._raw_saved_output.data.physical, Derived)
    assert isinstance(node._raw_saved_logsumexp.data.physical, Derived)
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
