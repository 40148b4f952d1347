"""Rows that are restored with their own mean and size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import VOCABULARY, Watch, batch, compressed, gradients, lora, relative_error
from transformers import LlamaConfig, LlamaForCausalLM

from daf_hf.matching import RowStatistics
from daf_hf.sites import SaveSite


@given(st.integers(1, 8), st.integers(2, 40), st.floats(1e-3, 1e3), st.integers(0, 100))
def test_restored_rows_get_their_statistics(rows, cols, size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * size + size
    y = x + torch.randn(rows, cols, generator=generator) * size
    found = RowStatistics.of(x.view(-1), cols).match(y.clone().view(-1)).view(rows, cols)
    assert torch.allclose(found.mean(1), x.mean(1), atol=1e-4 * size)
    ours, theirs = (each.double().var(1, correction=0) for each in (found, x))
    assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5 * size**2)
    centred = [each - each.mean(1, keepdim=True) for each in (y, found)]
    assert bool((torch.cosine_similarity(*centred, dim=1) > 0.99).all())  # turned nowhere


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_without_a_direction_keep_their_mean(dtype):
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]], dtype=dtype)
    statistics = RowStatistics.of(x.view(-1), 3)
    assert statistics.match(torch.full((6,), 7.0, dtype=dtype)).tolist() == [2] * 3 + [4] * 3
    assert torch.equal(statistics.match(x.clone().view(-1)).view(2, 3), x)


def massive(layers=12):
    """Llama with a first token of a few massive elements, as large models have."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
        initializer_range=0.15,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 5] = 300.0
        model.model.embed_tokens.weight[3, 40] = -200.0
    return lora(model, ["q_proj", "v_proj"], 0.0).train()


def error_of(model, inputs, budget_mb):
    exact = gradients(model, inputs)
    daf, compressor = compressed(model, budget_mb)
    watch = Watch(compressor)
    error = relative_error(gradients(model, inputs, daf), exact)
    assert watch.peak <= budget_mb * 1e6
    return error, daf.report.predicted_gradient_error


def test_errors_do_not_grow_from_layer_to_layer(monkeypatch):
    """Where activations are massive, those of rows of another size did."""
    inputs = batch("llama", 8, 32)
    inputs["input_ids"][:, 0] = 3
    error, predicted = error_of(massive(), inputs, 1.5)
    assert error < 1.5 * predicted
    monkeypatch.setattr(SaveSite, "matched", property(lambda site: False))
    monkeypatch.setattr("daf_hf.watching.Item.matched", property(lambda item: False))
    unmatched, _ = error_of(massive(), inputs, 1.5)
    assert unmatched > error
