"""Graphs that keep everything."""

from __future__ import annotations

import torch
from tiny import batch, build, compressed, relative_error

from daf_hf.probing import Graph


def weak(dtype):
    """A model whose gradients are as small as those of the tokens of a large batch."""
    model = build("gpt2", 0.0)
    torch.manual_seed(0)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.normal_(0, 0.1)
    model.base_model.model.lm_head.register_forward_hook(lambda m, args, output: output * 1e-4)
    return model.to(dtype), trained


def gradients_by_graph(dtype):
    """At the scale that a graph takes them at, and what that is."""
    model, trained = weak(dtype)
    compressor = compressed(model, 1.0)[1]
    compressor.learn_parameters()
    with Graph(compressor, model.forward, ((), batch("gpt2")), lambda: 1e9) as graph:
        graph.find_readers()
        found = graph.gradients(list(trained.values()))
        return {
            n: g.float() / graph.scale for n, g in zip(trained, found, strict=True)
        }, graph.scale


def test_small_gradients_do_not_vanish_in_fp16(monkeypatch):
    exact, scale = gradients_by_graph(torch.float32)
    assert scale == 1
    scaled, scale = gradients_by_graph(torch.float16)
    assert scale > 1
    assert relative_error(scaled, exact) < 0.05
    monkeypatch.setattr("daf_hf.probing.SCALES", (1.0, 1.0))
    assert relative_error(gradients_by_graph(torch.float16)[0], exact) > 0.2
