"""What calibration offers to a metric."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, build, compressed, gradients


def probed(name, look, **options):
    """What ``look(site, probe)`` returns for each measured site, by site."""
    seen = {}

    def metric(site, probe):
        seen[site] = look(site, probe)
        return 1.0

    model, inputs = build(name, dropout=0.0), batch(name)
    daf, _ = compressed(model, 0.5, importance=metric, calibrate_at=(0,), **options)
    gradients(model, inputs, daf)
    return seen


def test_elements_are_rows_of_what_was_saved():
    for site, tensors in probed("bert", lambda s, p: p.elements(s)).items():
        assert all(t.dim() == 2 and t.numel() for t in tensors), site.name
        heads = site.shape[1] * site.shape[-1] if len(site.shape) == 4 else 1  # of a token
        assert {t.shape[1] for t in tensors} <= {*site.shape, heads, 1}


def test_random_rounding_changes_gradients_by_its_seed_and_leaves_no_trace():
    def look(site, probe):
        before = probe.gradient_error(site)
        one, again, other = (probe.rounded_gradient(site, 1, seed) for seed in (0, 0, 1))
        exact = probe.rounded_gradient(site, 8, 0)
        same = [torch.equal(a, b) for a, b in zip(one, again, strict=True) if a is not None]
        alike = [torch.equal(a, b) for a, b in zip(one, other, strict=True) if a is not None]
        sizes = [sum(float(g.square().sum()) for g in x if g is not None) for x in (one, exact)]
        return before, probe.gradient_error(site), all(same), all(alike), sizes

    seen = probed("bert", look)
    assert len(seen) > 10
    for before, after, same, alike, (coarse, fine) in seen.values():
        assert before == pytest.approx(after, rel=1e-4)
        assert same
        assert not alike or coarse == 0
        assert fine < coarse / 100 or coarse == 0
    assert sum(coarse > 0 for *_, (coarse, _) in seen.values()) > 10
