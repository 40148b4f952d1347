"""Codebooks: distortions as documented, embedded codes, and what names mean."""

from __future__ import annotations

import pytest
import torch
from tiny import restored

from daf_hf.codecs import BINARY, GELU, GENERAL, Codec, gelu_slope, parse_codec
from daf_hf.kernels.format import MAX_BITS, Granularity

BOOKS = ("uniform", "normal", "root", "gelu")


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors, of which torch is slow to make parallel work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def relative_error(x: torch.Tensor, codec: Codec, bits: int) -> float:
    return float((restored(x, codec, bits) - x).square().mean() / x.var())


@pytest.mark.parametrize(("bits", "error"), [(1, 0.363), (2, 0.1215), (3, 0.0363), (4, 0.0101)])
def test_normal_is_near_optimal_for_a_gaussian(bits, error):
    x = torch.randn(1000, 512, generator=torch.Generator().manual_seed(0))
    measured = relative_error(x, Codec(Granularity.TENSOR, "normal"), bits)
    assert measured == pytest.approx(error, rel=0.02)


def test_zero_bits_keep_the_mean():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) + 3
    for granularity, dim in ((Granularity.TOKEN, 1), (Granularity.CHANNEL, 0)):
        out = restored(x, Codec(granularity, "normal"), 0)
        torch.testing.assert_close(out, x.mean(dim, keepdim=True).expand_as(x), rtol=0.01, atol=0)


@pytest.mark.parametrize(("bits", "ratio"), [(1, 0.17), (2, 0.57)])
def test_uniform_bins_beat_levels_at_both_ends(bits, ratio):
    x = torch.randn(400, 256, generator=torch.Generator().manual_seed(0))
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    levels = ((x - low) / step).round() * step + low
    ours = restored(x, Codec(Granularity.GROUP, "uniform"), bits)
    measured = (ours - x).square().mean() / (levels - x).square().mean()
    assert float(measured) == pytest.approx(ratio, abs=0.05)


def test_root_beats_uniform_on_softmax_outputs():
    x = torch.randn(500, 128, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    for bits in (2, 3, 4):
        root, uniform = (
            relative_error(x, Codec(Granularity.TENSOR, book), bits) for book in ("root", "uniform")
        )
        assert root < uniform / 2


def test_gelu_keeps_the_derivative():
    x = torch.randn(100, 256, generator=torch.Generator().manual_seed(0)) * 2
    slope = gelu_slope(x)
    low, high = float(slope.min()), float(slope.max())
    for bits in range(1, MAX_BITS + 1):
        error = (gelu_slope(restored(x, GELU, bits)) - slope).abs().max()
        # Half a bin, and the width of a cell of the grid (16 / 4096) at the steepest slope.
        assert float(error) <= (high - low) / 2 ** (bits + 1) + 0.005


@pytest.mark.parametrize("book", BOOKS)
def test_tables_are_finite_and_in_order(book):
    tables = Codec(Granularity.GROUP, book).book.tables
    for bits, table in enumerate(tables):
        assert table.shape == (2**bits,)
        assert table.dtype is torch.float32
        assert table.isfinite().all()
        if bits <= 6:  # from 7 bits on, a code may have no cell of its own
            assert (table.diff() > 0).all()


@pytest.mark.parametrize("book", BOOKS)
def test_tables_are_embedded(book):
    """A code's value lies between those of the two codes that it splits into."""
    tables = Codec(Granularity.GROUP, book).book.tables
    for bits in range(6):
        low, high = tables[bits + 1].view(-1, 2).unbind(1)
        assert (low <= tables[bits]).all() and (tables[bits] <= high).all()


@pytest.mark.parametrize("book", ["uniform", "normal"])
def test_error_falls_with_every_bit(book):
    x = torch.randn(50, 256, generator=torch.Generator().manual_seed(0))
    errors = [relative_error(x, Codec(Granularity.GROUP, book), bits) for bits in range(6)]
    assert errors == sorted(errors, reverse=True)


def test_names():
    assert parse_codec("token+normal") == Codec(Granularity.TOKEN, "normal")
    assert parse_codec("gelu") == GELU
    assert parse_codec("binary") == BINARY
    for codec in (GELU, BINARY, GENERAL, Codec(Granularity.CHANNEL, "root")):
        assert parse_codec(str(codec)) == codec
    for text in ("token+gauss", "row+normal", ""):
        with pytest.raises(ValueError, match="unknown codec"):
            parse_codec(text)


def test_lossless_and_private():
    assert BINARY.lossless and not GELU.lossless
    assert GELU.private and not GENERAL.private


def test_layouts_are_shared():
    assert GENERAL.layout(1000, 10, 2) is GENERAL.layout(1000, 10, 3)  # both in bf16
    assert GENERAL.layout(1000, 10, 4) is not GENERAL.layout(1000, 10, 5)
