"""Fitted codebooks: cuts that are optimal one by one, and what they gain."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tiny import restored

from daf_hf.codecs import _LAYOUTS_KEPT, GELU, Codec, gelu_slope
from daf_hf.fitting import codebook_from_samples, fitted, tree_codes
from daf_hf.kernels import cpu, reference
from daf_hf.kernels.format import MAX_BITS, Granularity, Statistics

ROWS, COLS = 512, 96
NATIVE = cpu.status().available


def generator():
    return torch.Generator().manual_seed(0)


DATA = {
    "softmax": torch.randn(ROWS, COLS, generator=generator()).mul(3).softmax(-1),
    "normal": torch.randn(ROWS, COLS, generator=generator()),
    "skewed": torch.randn(ROWS, COLS, generator=generator()).exp(),
    "outliers": torch.randn(ROWS, COLS, generator=generator())
    * torch.rand(ROWS, COLS, generator=generator()).sub(0.99).sign().mul(15).add(16),
    "two peaks": torch.randn(ROWS, COLS, generator=generator()).sign()
    + 0.1 * torch.randn(ROWS, COLS, generator=generator()),
    "constant": torch.full((ROWS, COLS), 3.0),
    "mostly zero": torch.randn(ROWS, COLS, generator=generator()).sub(2).relu(),
}


def fit(x, codec):
    layout = codec.layout(x.numel(), x.shape[-1], 2)
    a, s, _ = reference.statistics(x.flatten(), layout, 2)
    return fitted(codec, x.flatten(), reference.expand(a, layout), reference.expand(s, layout))


def error(x, codec, bits):
    return float((restored(x, codec, bits) - x).square().sum() / x.square().sum())


# Cuts -------------------------------------------------------------------------------------------

CELLS = 24
totals = arrays(np.float64, CELLS, elements=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
values = arrays(np.float64, CELLS, elements=st.floats(0, 1), unique=True).map(np.sort)


def explained(weight, moment, cells):
    total = weight[cells].sum()
    return moment[cells].sum() ** 2 / total if total else 0.0


@given(totals, values)
def test_every_cut_is_the_best_there_is(weight, value):
    codes, moment = tree_codes(weight, weight * value), weight * value
    assert codes.min() >= 0
    assert codes.max() < 1 << MAX_BITS
    assert (np.diff(codes) >= 0).all()
    for bits in range(MAX_BITS):
        parents, bins = codes >> (MAX_BITS - bits), codes >> (MAX_BITS - bits - 1)
        for parent in np.unique(parents):
            cells = np.flatnonzero(parents == parent)
            if len(cells) == 1:
                continue
            got = sum(explained(weight, moment, cells[bins[cells] == b]) for b in set(bins[cells]))
            best = max(
                explained(weight, moment, cells[:cut]) + explained(weight, moment, cells[cut:])
                for cut in range(1, len(cells))
            )
            assert got == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_cells_that_were_never_seen_are_shared_out_evenly():
    weight = np.zeros(101)
    weight[[0, 100]] = 1.0
    top = tree_codes(weight, weight * np.arange(101)) >> (MAX_BITS - 1)
    assert np.flatnonzero(np.diff(top)).tolist() == [49]


# Codebooks --------------------------------------------------------------------------------------

NAMED = [Codec(g, b) for g in Granularity for b in ("uniform", "normal", "root")]


@pytest.mark.parametrize("codec", NAMED, ids=str)
@pytest.mark.parametrize("name", DATA)
def test_fitted_is_no_worse_at_few_bits(codec, name):
    x = DATA[name]
    if codec.codebook == "root" and float(x.min()) < 0:
        pytest.skip("root is for what is not negative")
    own = fit(x, codec)
    for bits in (1, 2, 3):
        assert error(x, own, bits) <= error(x, codec, bits) * 1.01 + 1e-9


@pytest.mark.parametrize(
    ("name", "codec", "bits", "factor"),
    [
        ("softmax", Codec(Granularity.TOKEN, "root"), 1, 3),
        ("softmax", Codec(Granularity.TOKEN, "root"), 2, 2),
        ("outliers", Codec(Granularity.CHANNEL, "normal"), 2, 2),
        ("two peaks", Codec(Granularity.TENSOR, "normal"), 1, 5),
        ("skewed", Codec(Granularity.TENSOR, "normal"), 2, 2),
    ],
)
def test_what_is_gained(name, codec, bits, factor):
    x = DATA[name]
    assert error(x, fit(x, codec), bits) * factor < error(x, codec, bits)


def test_a_gaussian_is_cut_as_lloyd_and_max_do():
    x = torch.randn(400, 512, generator=generator())
    own = fit(x, Codec(Granularity.TENSOR, "normal"))
    for bits, optimum in ((1, 0.3634), (2, 0.1175)):
        assert error(x, own, bits) == pytest.approx(optimum, rel=0.04)


@pytest.mark.parametrize("bits", range(1, MAX_BITS + 1))
def test_the_mean_is_kept(bits):
    """Rounding errors that share a sign would add up over layers."""
    x = DATA["softmax"]
    out = restored(x, fit(x, Codec(Granularity.TENSOR, "root")), bits)
    assert float(out.mean()) == pytest.approx(float(x.mean()), rel=1e-3)


@pytest.mark.parametrize("name", ["normal", "skewed"])
def test_gelu_in_terms_of_its_derivative(name):
    x = DATA[name] - 0.5
    own, slope = fit(x, GELU), gelu_slope(x)
    assert own.private
    for bits in range(5):
        mine, named = (
            float((gelu_slope(restored(x, codec, bits)) - slope).square().mean())
            for codec in (own, GELU)
        )
        assert mine <= named * 1.01
    assert float(gelu_slope(restored(x, own, 0)).mean()) == pytest.approx(
        float(slope.mean()), rel=1e-3
    )


@pytest.mark.parametrize("codec", [*NAMED, GELU], ids=str)
def test_other_values_than_those_fitted_to(codec):
    """Training goes on, and values drift; nothing is lost beyond what the bins say."""
    own = fit(DATA["softmax"], codec)
    for x in (DATA["softmax"] * 1e4, DATA["outliers"] * 10, DATA["constant"] * 0):
        for bits in (0, 1, 4, 8):
            assert restored(x, own, bits).isfinite().all()


@pytest.mark.parametrize("codec", [*NAMED, GELU], ids=str)
@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built")
def test_native_kernels_agree_bit_for_bit(codec):
    for x in (DATA["softmax"], DATA["outliers"]):
        own = fit(x, codec)
        for bits in range(MAX_BITS + 1):
            theirs = restored(x, own, bits, cpu.load())
            assert torch.equal(restored(x, own, bits), theirs)


# From samples -----------------------------------------------------------------------------------

QUANTILES = torch.distributions.Laplace(0.0, 1.0).icdf((torch.arange(20_000) + 0.5) / 20_000)


def test_samples_of_a_distribution_serve_what_is_distributed_so():
    own = codebook_from_samples("laplace", QUANTILES)
    assert (own.name, own.statistics) == ("laplace", Statistics.MOMENTS)
    x = torch.distributions.Laplace(5.0, 3.0).icdf(torch.rand(400, 256, generator=generator()))
    x = x.clamp(-100, 100)
    own, theirs = Codec(Granularity.TENSOR, own), Codec(Granularity.TENSOR, "normal")
    for bits, share in ((1, 0.99), (2, 0.93), (3, 0.85), (4, 0.73)):
        assert error(x, own, bits) < share * error(x, theirs, bits)


def test_samples_may_be_normalised_by_their_range():
    own = codebook_from_samples("steps", DATA["softmax"].numpy(), "range")
    assert own.statistics is Statistics.RANGE
    x = DATA["softmax"]
    for bits in (1, 2, 3):
        assert error(x, Codec(Granularity.TENSOR, own), bits) < error(
            x, Codec(Granularity.TENSOR, "root"), bits
        )


def test_values_in_no_sample_are_restored_as_well_as_can_be():
    own = codebook_from_samples("ends", [-1.0, 1.0] * 50)
    x = torch.linspace(-2, 2, 1000)
    assert float((restored(x, Codec(Granularity.TENSOR, own), 8) - x).abs().max()) < 0.2


@pytest.mark.parametrize("samples", [[], [1.0], [2.0, 2.0], [0.0, float("inf")]])
def test_samples_that_cannot_serve(samples):
    with pytest.raises(ValueError, match="codebook 'x': use finite samples"):
        codebook_from_samples("x", samples)


def test_samples_need_statistics():
    with pytest.raises(ValueError, match="statistics='none': use 'moments' or 'range'"):
        codebook_from_samples("x", [1.0, 2.0], "none")


# Lifetime ---------------------------------------------------------------------------------------


def test_a_codebook_goes_with_its_codec():
    own = fit(DATA["softmax"], Codec(Granularity.TOKEN, "root"))
    restored(DATA["softmax"], own, 2)
    alive = weakref.ref(own.book)
    del own
    gc.collect()
    assert alive() is None


def test_layouts_do_not_pile_up():
    own = fit(DATA["softmax"], Codec(Granularity.TOKEN, "root"))
    for rows in range(2 * _LAYOUTS_KEPT):
        own.layout(rows * COLS, COLS, 2)
    assert len(own._layouts) <= _LAYOUTS_KEPT


def test_what_it_is_called():
    own = fit(DATA["softmax"], Codec(Granularity.TOKEN, "root"))
    assert str(own) == "fitted token+root"
    assert str(fit(DATA["normal"], GELU)) == "fitted gelu"
    assert own != Codec(Granularity.TOKEN, "root")
    assert own != fit(DATA["softmax"], Codec(Granularity.TOKEN, "root"))
