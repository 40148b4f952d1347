"""torch.compile sees the model, and nothing of what packs, unpacks or ends meanwhile."""

from __future__ import annotations

import torch
from tiny import compressed, nothing_held
from torch import nn


class Eager(nn.Module):
    """What its forward calls is compiled, but not its own operations, which save tensors."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    @torch.compiler.disable(recursive=False)
    def forward(self, x):
        return (x * self.scale).exp().mean()


def test_hooks_are_not_traced():
    """Dynamo warns of what it cannot trace in them, and warnings are errors here."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Eager()
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
