"""How tensors lie in memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daf_hf.tensors import columns, geometry, same_bits

X = torch.empty(3, 5, 7, 11)


@pytest.mark.parametrize(
    ("tensor", "dims", "whole"),
    [
        (X, (3,), True),
        (X.flatten(), (0,), True),
        (X[0, 0, 0, 0], (), True),
        (X[:, :, :, :1], (), False),
        (X.transpose(1, 2), (3, 1), True),  # heads of attention
        (X.transpose(1, 2).flatten(0, 1), (2,), True),
        (X.permute(0, 3, 1, 2), (1,), True),  # channels last
        (X.transpose(2, 3), (2,), True),
        (X.flatten(0, 2).t(), (0,), True),
        (X[:1].transpose(1, 2), (3, 1), True),
        (X[:, :1].transpose(1, 2), (3,), False),  # one token: nothing was moved in between
        (X[:, None].expand(3, 4, 5, 7, 11), (4,), True),
        (X[0].expand(3, 5, 7, 11).transpose(1, 2), (3, 1), True),
        (torch.empty(3, 0, 2), (), True),
    ],
)
def test_columns_are_what_belongs_to_one_row(tensor, dims, whole):
    _, found, is_whole = geometry(tensor.shape, tensor.stride())
    assert (found, is_whole) == (dims, whole)


@given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_columns_are_neighbours_in_memory(order, sizes):
    """Whatever the order of the dimensions: adjacent elements are in one row, and rows tile it."""
    tensor = torch.arange(torch.Size(sizes).numel()).view(sizes).permute(order)
    extent, dims, whole = geometry(tensor.shape, tensor.stride())
    count = columns(tensor.shape, dims, extent)
    assert whole and extent == tensor.numel() and extent % count == 0
    rest = [d for d in range(4) if d not in dims]
    rows = tensor.permute(*rest, *sorted(dims, key=lambda d: -tensor.stride(d))).reshape(-1, count)
    assert bool((rows == rows[:, :1] + torch.arange(count)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_same_bits(dtype):
    x = torch.tensor([0.0, 1.5, math.nan, -2.0, 3.0], dtype=dtype)
    other = x.clone()
    assert same_bits(x, other)
    assert same_bits(x[1:], other[1:]) and same_bits(x[:0], other[:0])
    other[0] = -0.0
    assert not same_bits(x, other)
    other[0], other[4] = 0.0, 2.0
    assert not same_bits(x, other)
