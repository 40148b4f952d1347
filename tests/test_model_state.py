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
