"""What is stored of one activation: its parts are the whole."""

from __future__ import annotations

import math

import pytest
import torch

from daf_hf.arena import Arena
from daf_hf.codecs import BINARY, GELU, Codec
from daf_hf.kernels import reference
from daf_hf.kernels.format import Granularity
from daf_hf.stored import PAGE_ELEMENTS, PART_PAGES, Stored


@pytest.mark.parametrize("codec", [BINARY, GELU, Codec(Granularity.TENSOR, "normal")], ids=str)
@pytest.mark.parametrize("numel", [1, 8192, PART_PAGES * PAGE_ELEMENTS + 1, 3 * PART_PAGES * 8192])
def test_parts_are_the_whole(codec, numel):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    x = (x > 0).float() if codec.lossless else x
    bits = 1 if codec.lossless else 2
    arena = Arena(1e9, torch.device("cpu"))
    stored = Stored(codec.layout(numel, 1, bits), bits, (bits,), ())
    assert arena.insert(stored)
    assert reference.encode(x, stored.layout, bits, stored.table, arena.space)
    whole, parts = torch.empty(numel), torch.full((numel,), math.nan)
    reference.decode(whole, stored.layout, bits, stored.table, arena.space)
    starts = []
    for start in stored.part_starts():
        part = stored.part(start)
        starts.append(start)
        out = parts[start : start + part.layout.numel]
        reference.decode(out, part.layout, bits, part.table, arena.space)
    assert torch.equal(parts, whole)
    assert starts == list(range(0, numel, PART_PAGES * PAGE_ELEMENTS))


def test_a_tensor_whose_statistics_differ_from_place_to_place_has_one_part():
    numel = 3 * PART_PAGES * PAGE_ELEMENTS
    for granularity in (Granularity.GROUP, Granularity.TOKEN, Granularity.CHANNEL):
        layout = Codec(granularity, "normal").layout(numel, 64, 1)
        whole = Stored(layout, 1, (1,), ())
        assert list(whole.part_starts()) == [0] and whole.part(0) is whole
