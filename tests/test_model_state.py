"""The state of a model: afterwards what it was."""

from __future__ import annotations

import torch
from torch import nn

from daf_hf.model_state import untouched


def test_untouched_restores_replaced_buffers():
    class Replaces(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(3))

        def forward(self):
            self.table = self.table + 1

    model = Replaces()
    table = model.table
    with untouched(model, torch.device("cpu")):
        model()
        model.table.add_(5)
        table.add_(1)
    assert model.table is table
    assert torch.equal(table, torch.zeros(3))


def test_untouched_restores_sparse_buffers():
    """PEFT's FroD has some."""
    model = nn.Module()
    model.register_buffer("table", torch.eye(3).to_sparse())
    with untouched(model, torch.device("cpu")), torch.no_grad():
        model.table.mul_(2)
    assert torch.equal(model.table.to_dense(), torch.eye(3))


def test_untouched_restores_resized_buffers():
    """torch.ao's observers have empty ones until they have seen something."""
    model = nn.Module()
    model.register_buffer("least", torch.empty(0))
    model.register_buffer("table", torch.arange(6.0).view(2, 3))
    least, table = model.least, model.table
    with untouched(model, torch.device("cpu")), torch.no_grad():
        least.resize_(4).fill_(1)
        table.resize_(1).fill_(1)
    assert model.least is least
    assert least.shape == (0,)
    assert torch.equal(table, torch.arange(6.0).view(2, 3))


def test_buffers_without_elements_are_left_alone():
    model = nn.Module()
    model.register_buffer("table", torch.zeros(3, device="meta"))
    with untouched(model, torch.device("cpu")):
        pass
    assert model.table.is_meta
