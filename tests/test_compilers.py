"""torch.compile sees the model, and nothing of what packs, unpacks or ends meanwhile."""

from __future__ import annotations

import torch
from tiny import compressed, nothing_held
from torch import nn


class Broken(nn.Module):
    """Its graph breaks in the middle, where an operation runs that no compiler takes up."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = self.first(x).relu()
        x.register_hook(torch.compiler.disable(lambda gradient: gradient))
        return self.last(x).square().mean()


def test_hooks_are_not_traced():
    """Dynamo warns of what it cannot trace in them, and warnings are errors here."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Broken()
    compiled = torch.compile(model, backend="eager")
    daf, compressor = compressed(model, 0.2, calibrate_at=(0,))
    for _ in range(2):
        with daf:
            loss = compiled(torch.randn(128, 64))
        loss.backward()
        del loss
        daf.step()
    assert compressor.ledger.peak.held > 0
    assert nothing_held(compressor)
    torch._dynamo.reset()
