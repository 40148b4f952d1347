"""Handles: what they restore, or refuse to."""

from __future__ import annotations

import pytest
import torch

from daf_hf.handles import Kept, Recast, View
from daf_hf.leases import Lease
from daf_hf.physical import Refused
from daf_hf.refusal import BudgetError, Refusal
from daf_hf.sites import SaveSite

SITE = SaveSite("a/0", "a")


def test_kept_is_detached_and_the_same_memory():
    tensor = torch.ones(4, requires_grad=True) * 2
    kept = Kept(tensor).restore()
    assert not kept.requires_grad
    assert kept.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_recast_gives_the_same_bits(dtype, transposed):
    parameter = torch.nn.Parameter(torch.randn(8, 16))
    low = parameter.detach().to(dtype)
    low = low.t() if transposed else low
    handle = Recast(low, parameter, Lease(lambda _: None, None))
    restored = handle.restore()
    assert torch.equal(restored, low)
    assert (restored.dtype, restored.stride()) == (dtype, low.stride())


def test_recast_notices_that_the_parameter_changed():
    parameter = torch.nn.Parameter(torch.randn(8, 16))
    handle = Recast(parameter.detach().bfloat16(), parameter, Lease(lambda _: None, None))
    with torch.no_grad():
        parameter.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        handle.restore()


def test_refused_raises_the_budget_error():
    refusal = Refusal()
    refusal.begin(1e6, 500, 0)
    refusal.add("a/0", 2_000_000)
    physical = Refused(SITE, refusal)
    tensor = torch.ones(4)
    view = View(tensor, tensor.shape, tensor.stride(), physical, Lease(lambda _: None, None))
    with pytest.raises(BudgetError, match=r"budget_mb=1 .*budget_mb=2\.01.*a/0 \(2\.00 MB\)"):
        view.restore()


def test_refusal_names_the_largest_sites_first():
    refusal = Refusal()
    assert not refusal
    refusal.begin(1e6, 0, 2)
    for number in range(8):
        refusal.add(f"site/{number}", 1000 * number)
    assert refusal
    text = str(refusal.error())
    assert text.index("site/7") < text.index("site/6") < text.index("site/3")
    assert "site/2" not in text
    for way_out in ("larger budget_mb", "smaller batch", "bits below 2", "checkpointing", "spill"):
        assert way_out in text


def test_the_least_budget_is_rounded_up():
    refusal = Refusal()
    refusal.begin(1e6, 0, 2)
    refusal.add("a/0", 1_230_001)
    assert "budget_mb=1.24 is the least" in str(refusal.error())


def test_fewer_bits_are_advised_only_where_there_are_fewer():
    refusal = Refusal()
    refusal.begin(1e6, 0, 0)
    refusal.add("a/0", 1_230_001)
    text = str(refusal.error())
    assert "bits=" not in text
    assert "shorter sequences, gradient checkpointing, or" in text
