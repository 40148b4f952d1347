"""Codebooks: distortions as documented, embedded codes, and what names mean."""

from __future__ import annotations

import pytest
import torch
from tiny import restored

from daf_hf import codecs, register_codebook
from daf_hf.codecs import (
    BINARY,
    GELU,
    GENERAL,
    SIGN,
    Codec,
    codebook_from_levels,
    gelu_slope,
    parse_codec,
    uniform,
)
from daf_hf.kernels.format import MAX_BITS, Granularity, Statistics

BOOKS = ("uniform", "normal", "root", "rectified", "gelu")


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


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("granularity", Granularity)
def test_rectified_keeps_zeros_and_nothing_else(granularity, bits):
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).relu()
    y = restored(x, Codec(granularity, "rectified"), bits)
    assert not y[x == 0].any()
    assert (y > 0).sum() > 0.995 * (x > 0).sum()


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
            half = len(table) // 2
            rising = table[half:] if book == "rectified" else table  # the minimum has a half
            assert (rising.diff() > 0).all()
            assert book != "rectified" or not table[:half].any()


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


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_signs_are_restored_as_they_are(bits):
    x = torch.tensor([0.0, -0.0, 1e-12, -1e-12, 3.0, -3.0, 1e20, -1e20]).repeat(40)
    assert torch.equal(restored(x.view(-1, 8), SIGN, bits).flatten(), (x > 0).float())


def test_names():
    assert parse_codec("token+normal") == Codec(Granularity.TOKEN, "normal")
    assert parse_codec("gelu") == GELU
    assert parse_codec("binary") == BINARY
    for codec in (GELU, SIGN, BINARY, GENERAL, Codec(Granularity.CHANNEL, "root")):
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


# Codebooks of a user's own ----------------------------------------------------------------------

LEVELS = [-1.0, -0.5, 0.0, 0.25, 2.0]


def mine():
    return codebook_from_levels("mine", LEVELS, "none")


@pytest.fixture
def registry(monkeypatch):
    """Registrations that end with the test."""
    monkeypatch.setattr(codecs, "_CODEBOOKS", dict(codecs._CODEBOOKS))


def test_levels_are_what_is_restored():
    x = torch.linspace(-3, 4, 1000)
    nearest = torch.tensor(LEVELS)[(x[:, None] - torch.tensor(LEVELS)).abs().argmin(1)]
    for bits in (3, 5, 8):
        restored_ = restored(x, Codec(Granularity.TENSOR, mine()), bits)
        wrong = restored_ != nearest
        # Only beside the middle between two levels, which is known to a cell.
        assert float(wrong.float().mean()) < 0.005
        assert set(restored_.tolist()) == set(LEVELS)


def test_short_codes_are_means_of_levels():
    tables = mine().tables
    assert tables[1].tolist() == pytest.approx([-0.3125, 2.0])
    assert tables[2].tolist()[:3] == pytest.approx([-0.75, 0.125, 2.0])
    assert tables[0].tolist() == pytest.approx([sum(LEVELS) / 5])


@pytest.mark.parametrize("levels", [[1.0], [], [0.0, float("nan")], range(257)])
def test_levels_that_cannot_serve(levels):
    with pytest.raises(ValueError, match="codebook 'few': use 2 to 256 distinct finite levels"):
        codebook_from_levels("few", levels)


@pytest.mark.parametrize("statistics", ["absmax", Statistics.PAIR, None])
def test_statistics_that_there_are_not(statistics):
    with pytest.raises(ValueError, match=r"statistics=.*'moments'"):
        codebook_from_levels("mine", LEVELS, statistics)


def test_registered_name(registry):
    assert register_codebook("mine")(mine) is mine
    codec = parse_codec("group+mine")
    assert codec == Codec(Granularity.GROUP, "mine")
    assert codec.book.name == "mine"
    assert parse_codec(str(codec)).book is codec.book


def test_a_name_is_registered_once(registry):
    register_codebook("mine")(mine)
    register_codebook("mine")(mine)
    for name, make in (("mine", lambda: mine()), ("uniform", mine)):
        with pytest.raises(ValueError, match=f"'{name}' is registered already: use another"):
            register_codebook(name)(make)


def test_what_is_registered_is_checked(registry):
    with pytest.raises(ValueError, match=r"codebook 'mine': .* must return a Codebook, not int"):
        register_codebook("mine")(lambda: 3)
    with pytest.raises(ValueError, match=r"codebook 'a\+b': use a name of letters"):
        register_codebook("a+b")(mine)
    assert "mine" not in codecs.codebook_names()


def test_a_codec_of_a_codebook_itself():
    own = codebook_from_levels("mine", LEVELS)
    codec = Codec(Granularity.TOKEN, own)
    assert codec.book is own
    assert str(codec) == "token+mine"
    assert str(Codec(Granularity.TENSOR, mine())) == "mine"
    assert codec == Codec(Granularity.TOKEN, own) != Codec(Granularity.TOKEN, mine())
    assert not codec.private and not codec.lossless
    assert Codec(Granularity.TOKEN, uniform()) != Codec(Granularity.TOKEN, "uniform")


def test_a_codebook_that_there_is_not():
    with pytest.raises(ValueError, match=r"no codebook 'gauss'.*normal"):
        Codec(Granularity.GROUP, "gauss").layout(10, 10, 2)
