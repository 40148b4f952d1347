"""Rows that are restored with their own mean and size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import VOCABULARY, Watch, batch, compressed, gradients, lora, relative_error
from transformers import LlamaConfig, LlamaForCausalLM

from daf_hf.matching import RowStatistics


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


@given(st.integers(0, 200), st.floats(0.5, 3.0))
def test_a_normalisation_enlarges_no_gradient(seed, size):
    """Its backward pass stays a projection, however far off the restored row is."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 32, generator=generator, dtype=torch.float64)
    x[0, 5] = 30.0  # a massive element
    restored = size * x + torch.randn(1, 32, generator=generator)
    statistics = RowStatistics.of(x.float().view(-1), 32)

    def largest_gain(row):
        centred = row.double().view(-1) - row.double().mean()
        energy = (x - x.mean()).square().sum()
        backward = torch.eye(32) - torch.outer(centred, centred) / energy
        return float(torch.linalg.eigvalsh(backward).abs().max())

    assert largest_gain(statistics.match(restored.float().view(-1).clone())) < 1 + 1e-4
    assert size < 1.5 or largest_gain(restored) > 1.1  # as it was restored


@pytest.mark.parametrize("budget_mb", [0.8, 1.5])
def test_errors_of_many_layers_are_as_predicted(budget_mb):
    """Where activations are massive, those of rows of another size grew from layer to layer."""
    inputs = batch("llama", 8, 32)
    inputs["input_ids"][:, 0] = 3
    model = massive()
    exact = gradients(model, inputs)
    daf, compressor = compressed(model, budget_mb)
    watch = Watch(compressor)
    error = relative_error(gradients(model, inputs, daf), exact)
    assert watch.peak <= budget_mb * 1e6
    assert any(site.matched for site in compressor.tracker.sites.values())
    assert error < 1.5 * daf.report.predicted_gradient_error
