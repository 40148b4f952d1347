"""Random rounding: levels, bias, variance."""

from __future__ import annotations

import pytest
import torch

from daf_hf.rounding import ranges, rounded_at_random


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_go_to_one_of_their_two_nearest_levels(bits, dtype):
    x = torch.randn(3, 100, generator=generator()).to(dtype)  # 300 elements: a group and a part
    y = rounded_at_random(x, bits, generator())
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    steps = ranges(x) / (2**bits - 1)
    each = steps.repeat_interleave(256)[:300].view(3, 100)
    slack = 0.02 if dtype is torch.bfloat16 else 1e-5
    assert ((x.float() - y.float()).abs() <= each + slack * x.abs().max()).all()
    if dtype is torch.float32:
        assert len(y.view(-1)[:256].unique()) <= 2**bits


def test_rounding_has_no_bias():
    x = torch.rand(256, generator=generator())
    draws = torch.stack([rounded_at_random(x, 2, generator(seed)) for seed in range(2000)])
    step = float(ranges(x)) / 3
    assert float((draws.mean(0) - x).abs().max()) < 5 * step / 2 / 2000**0.5
    # Uniform within a step: R^2 / (6 B^2) an element, as ActNN has it.
    assert float(draws.var(0).mean()) == pytest.approx(step**2 / 6, rel=0.1)


def test_equal_seeds_round_alike_and_others_do_not():
    x = torch.randn(1000, generator=generator())
    one, again, other = (rounded_at_random(x, 1, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)


@pytest.mark.parametrize("x", [torch.ones(300), torch.zeros(0), torch.tensor([3.0])])
def test_what_is_constant_stays(x):
    assert torch.equal(rounded_at_random(x, 1, generator()), x)


def test_no_bits_are_refused():
    with pytest.raises(ValueError, match="bits=0: use at least 1"):
        rounded_at_random(torch.ones(3), 0, generator())


def test_ranges_are_of_256_elements_each():
    x = torch.cat([torch.linspace(0, 1, 256), torch.linspace(5, 8, 256), torch.tensor([7.0, 9.0])])
    assert ranges(x).tolist() == [1.0, 3.0, 2.0]
