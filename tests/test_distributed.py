"""Ranks: what they tell each other, and when they do."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from several import on_threads
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from daf_hf.distributed import ALONE, needs_others, ranks_of, trained_module


def test_a_process_alone_agrees_with_itself():
    assert ALONE.alone
    assert ALONE.largest([1, -2.5]) == [1, -2.5]
    assert ALONE.gather(lambda: "own") == ["own"]
    assert ALONE.broadcast("own", 0) == "own"
    ALONE.fail(ValueError("nobody hears it"))


def test_what_fails_on_one_rank_is_raised_on_all():
    def works(ranks):
        return ranks.gather(lambda: ranks.rank)

    def breaks(ranks):
        return ranks.gather(lambda: {}["here"])

    def is_elsewhere(ranks):
        ranks.fail(ValueError("no forward pass"))

    one, own = on_threads(works, breaks)
    assert isinstance(one, RuntimeError) and "rank 1 failed: KeyError: 'here'" in str(one)
    assert isinstance(own, KeyError)
    one, _ = on_threads(works, is_elsewhere)
    assert "rank 1 failed: ValueError: no forward pass" in str(one)
    assert on_threads(works, works) == [[0, 1], [0, 1]]


class Model(nn.Linear):
    """Notes with how many others each of its forward passes is made."""

    def forward(self, x):
        self.ranks = ranks_of(self)
        return super().forward(x)


@pytest.fixture
def group(tmp_path):
    """A group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_of_one_is_alone(group):
    model = Model(2, 2)
    ddp = DistributedDataParallel(model)
    ddp(model.weight)
    assert model.ranks is ALONE
    assert trained_module(ddp) is model is trained_module(model)


def test_models_that_a_rank_cannot_run_alone(group):
    assert not needs_others(nn.BatchNorm1d(2))
    assert "SyncBatchNorm" in needs_others(nn.Sequential(nn.SyncBatchNorm(2)))


def test_without_a_group_every_model_can_be_run_alone():
    assert not needs_others(nn.SyncBatchNorm(2))
    assert ranks_of(nn.Linear(2, 2)) is ALONE
