"""The Triton backend gives the reference's results bit for bit: on a GPU, or interpreted.

Triton must learn that it is to interpret before anything imports it, so without a GPU these tests
need TRITON_INTERPRET=1 from outside; test_triton_loader.py runs them so.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from test_kernels import (
    CODECS,
    DTYPES,
    FLOATS,
    ISAS,
    ODD,
    Pages,
    check_conformance,
    compare,
    poisoned,
    same_bits,
    values,
)

from daf_hf.codecs import BINARY, GELU, Codec
from daf_hf.kernels import cpu, get_backend, reference
from daf_hf.kernels.format import Granularity
from daf_hf.kernels.triton_launch import LaunchTable, Shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

triton_backend = pytest.importorskip("daf_hf.kernels.triton_backend")
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 from outside", allow_module_level=True)

EVERYTHING = DEVICE == "cuda" or "DAF_HF_TEST_EVERYTHING" in os.environ
"""Interpreted, every codec meets every dtype and every width, but not every pair of the two."""


@pytest.fixture
def triton():
    return get_backend("triton", DEVICE)


@pytest.fixture(autouse=True)
def numpy_says_nothing_of_overflow():
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("bits", range(9))
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_width(triton, codec, bits):
    for dtype in FLOATS if EVERYTHING else [FLOATS[(bits + CODECS.index(codec)) % 3]]:
        rows, cols = (3, 256) if bits % 2 else (9, 65)
        x = values("normal", rows * cols, dtype, bits)
        assert check_conformance(triton, x, codec, cols, bits, DEVICE)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_dtype(triton, codec, dtype):
    assert check_conformance(triton, values("tails", 600, dtype, 1), codec, 40, 2, DEVICE)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257])
@pytest.mark.parametrize("book", ["uniform", "normal", "gelu"])
def test_sizes(triton, book, count):
    codec = GELU if book == "gelu" else Codec(Granularity.GROUP, book)
    assert check_conformance(triton, values("normal", count, FLOATS[0], 2), codec, 1, 3, DEVICE)


@pytest.mark.parametrize("cols", [1, 7, 512, 700])
@pytest.mark.parametrize("unit", [Granularity.TOKEN, Granularity.CHANNEL])
def test_columns(triton, unit, cols):
    x = values("normal", -(-300 // cols) * cols, torch.float32, 3)
    assert check_conformance(triton, x, Codec(unit, "normal"), cols, 3, DEVICE)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_several_pages(triton, codec):
    """More than a page of each plane and, by groups and rows, of statistics."""
    cols = 64 if codec.granularity is Granularity.TOKEN else 256
    rows = 129 if codec.granularity is Granularity.GROUP else 8448 // cols
    x = values("normal", rows * cols, torch.bfloat16, 4)
    assert check_conformance(triton, x, codec, cols, 5, DEVICE)


@pytest.mark.parametrize("book", ODD, ids=lambda book: f"{book.cells} cells")
def test_a_codebook_of_the_users_own_is_data(triton, book):
    for index, unit in enumerate(Granularity):
        x = values("tails", 330, FLOATS[index % 3], index)
        check_conformance(triton, x, Codec(unit, book), 33, 1 + 2 * index, DEVICE)


KINDS = ["denormal", "zeros", "constant", "sparse", "huge", "probability"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", Granularity, ids=lambda unit: unit.name)
def test_extreme_values(triton, unit, kind):
    for index, book in enumerate(("uniform", "normal")):
        x = values(kind, 330, FLOATS[(KINDS.index(kind) + index) % 3], 5)
        check_conformance(triton, x, Codec(unit, book), 33, 4, DEVICE)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", CODECS[:9:2] + CODECS[9:], ids=str)
def test_non_finite_is_refused(triton, codec, bad):
    x = values("normal", 330, FLOATS[0], 0)
    x[329] = bad
    for bits in (0, 2):
        compare(triton, x, codec.layout(330, 33, bits), bits, None, DEVICE)


@pytest.mark.parametrize("codec", CODECS[:-1], ids=str)
def test_statistics_that_overflow_are_refused(triton, codec):
    if codec.private:
        pytest.skip("has no statistics")
    x = torch.full((512,), 3e38)
    x[::3] *= -1
    assert not check_conformance(triton, x, codec, 16, 2, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 257, 9000])
def test_two_valued(triton, count, dtype):
    pairs = [(0.0, 1.0)]
    if dtype in FLOATS and count == 257:
        pairs += [(0.0, -float("inf")), (-0.0, 0.0), (1 / 0.9, 0.0), (5.0, 5.0)]
    for one, other in pairs:
        x = torch.where(torch.arange(count) % 7 == 3, other, one).to(dtype)
        assert check_conformance(triton, x, BINARY, count, 1, DEVICE)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8], ids=str)
def test_third_value_is_refused(triton, dtype):
    for place in (2, 8999):
        x = (torch.arange(9000) % 2).to(dtype)
        x[place] = 3
        assert not check_conformance(triton, x, BINARY, 9000, 1, DEVICE)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_is_a_value_like_any_other(triton, dtype):
    x = torch.where(torch.arange(600) % 3 == 0, float("nan"), 2.0).to(dtype)
    layout = BINARY.layout(600, 600, 1)
    pages, out = Pages(layout, 1, device=DEVICE), poisoned(600, dtype).to(DEVICE)
    assert triton.encode(x.to(DEVICE), layout, 1, pages.table, pages.space)
    triton.decode(out, layout, 1, pages.table, pages.space)
    assert same_bits(out.cpu(), x)


@pytest.mark.parametrize("above", [0, 100])
@pytest.mark.parametrize("unit", [Granularity.CHANNEL, Granularity.TENSOR])
def test_ranges_by_atomics_and_by_two_stages(unit, above):
    backend = triton_backend.TritonBackend(
        table=LaunchTable({"column_ranges": Shape(16, 1)}, above)
    )
    x = values("tails", 600 * 20, torch.float32, 6)
    assert check_conformance(backend, x, Codec(unit, "uniform"), 20, 2, DEVICE)


@pytest.mark.parametrize("block", [2, 16])
def test_launch_shapes_do_not_change_results(block):
    shapes = {name: Shape(block, 1) for name in ("encode_groups", "decode_elements")}
    backend = triton_backend.TritonBackend(table=LaunchTable(shapes))
    x = values("normal", 2000, torch.float32, 7)
    assert check_conformance(backend, x, Codec(Granularity.GROUP, "normal"), 40, 6, DEVICE)


@pytest.mark.parametrize("codec", [*CODECS[1::3], GELU], ids=str)
def test_backends_read_what_others_wrote(triton, codec):
    x = values("normal", 1300, torch.float32, 0)
    layout = codec.layout(1300, 65, 3)
    homes = [(triton, DEVICE), (reference, "cpu"), *([(cpu.load(), "cpu")] if ISAS else [])]
    for writer, home in homes:
        pages = Pages(layout, 3, device=home)
        assert writer.encode(x.to(home), layout, 3, pages.table, pages.space)
        restored = []
        for reader, there in homes:
            moved = Pages(layout, 3, device=there)
            for segment, source in zip(moved.space.segments, pages.space.segments, strict=True):
                segment.copy_(source)
            out = poisoned(1300, x.dtype).to(there)
            reader.decode(out, layout, 3, moved.table, moved.space)
            restored.append(out.cpu())
        assert all(same_bits(out, restored[0]) for out in restored)


def test_misfits_are_named(triton):
    layout = Codec(Granularity.GROUP, "uniform").layout(512, 512, 2)
    pages = Pages(layout, 2, device=DEVICE)
    good = torch.zeros(512, device=DEVICE)
    cases = [
        (good.double(), 2, pages.table, "dtype torch.float64"),
        (good.to(torch.uint8), 2, pages.table, "'uniform' cannot encode torch.uint8"),
        (good[:500], 2, pages.table, "512 elements"),
        (torch.zeros(1024, device=DEVICE)[::2], 2, pages.table, "contiguous"),
        (good, 9, pages.table, "0 <= bits <= 8"),
        (good, 2, pages.table[:-1], "table of 2"),
    ]
    for x, bits, table, message in cases:
        with pytest.raises(ValueError, match=message):
            triton.encode(x, layout, bits, table, pages.space)
    binary = BINARY.layout(512, 512, 1)
    with pytest.raises(ValueError, match="1 bit, not 2"):
        triton.encode(good, binary, 2, pages.table, pages.space)
