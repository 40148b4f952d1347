"""Models that FSDP2 shards: exact without a budget, within any other."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist
from ranks import on_ranks
from tiny import batch, build, loss_of, nothing_held, relative_error, same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from daf_hf import compress_activations

NAME = "roberta"
BUDGET = 0.3


def sharded():
    model = build(NAME, dropout=0.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.base_model.model.roberta.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gradients_of(model, rank, daf=None):
    """Of the second of two steps."""
    for _ in range(2):
        model.zero_grad()
        if daf is None:
            loss = loss_of(model(**batch(NAME, seed=rank)))
        else:
            with daf:
                loss = loss_of(model(**batch(NAME, seed=rank)))
        loss.backward()
        if daf is not None:
            daf.step()
            assert nothing_held(daf._session.compressor)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: gradient.full_tensor().clone() for name, gradient in found.items()}


def shards(rank):
    plain = gradients_of(sharded(), rank)
    found = {}
    for budget in (math.inf, BUDGET):
        model = sharded()
        daf = compress_activations(model, budget_mb=budget)
        found[budget] = gradients_of(model, rank, daf), daf.report
    return plain, found


@pytest.mark.supports("Distributed", "FSDP2 (fully_shard), not measured")
def test_a_sharded_model_is_exact_without_a_budget_and_within_any_other(tmp_path):
    for plain, found in on_ranks(tmp_path, shards):
        assert plain and same(found[math.inf][0], plain)
        gradients, report = found[BUDGET]
        assert 0 < report.held_bytes_peak <= BUDGET * 1e6 < report.plain_bytes
        assert math.isnan(report.predicted_gradient_error)
        assert 0 < relative_error(gradients, plain) < 0.5
