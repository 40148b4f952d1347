"""The gauge: what it says on a sample is what the kernels then do to the whole."""

from __future__ import annotations

import pytest
import torch
from tiny import restored
from torch import nn

from daf_hf import DAFConfig
from daf_hf.codecs import GELU, Codec
from daf_hf.gauge import FITTED_BEST, FITTED_ELEMENTS, Gauge, sample
from daf_hf.kernels.format import Granularity
from daf_hf.saved_tensors import Compressor
from daf_hf.sites import SaveSite
from daf_hf.watching import Item


def gauge(codec="auto"):
    return Gauge(Compressor(nn.Linear(4, 4), DAFConfig(budget_mb=10.0, codec=codec)))


def item(x, consumer="MmBackward0.self"):
    site = SaveSite("a/0", "a", consumers={consumer}, shape=tuple(x.shape))
    return Item(site, x.flatten(), tuple(x.shape), x.stride(), (x.ndim - 1,))


def noise(rows, cols):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))


DATA = {
    "normal": noise(4096, 96),
    "tall, heavy tails": noise(16384, 48).pow(3),
    "softmax": noise(8192, 64).mul(2).softmax(-1),
    "outliers": noise(2048, 128) * (1 + 30 * (torch.arange(128) == 77)),
    "wide": noise(256, 1024),
}


@pytest.mark.parametrize("name", DATA)
def test_distortions_are_those_of_the_kernels(name):
    measures, one = gauge(), item(DATA[name])
    found = measures.distortions(one)
    assert sum(codec.fitted is not None for codec in found) == FITTED_BEST
    for codec, errors in found.items():
        for bits in (1, 2, 4):
            _, error = measures.restore(one, codec, bits)
            if codec.granularity is Granularity.TENSOR:  # one range alone: a matter of luck
                continue
            assert errors[bits] == pytest.approx(error, rel=0.3, abs=1e-4), (str(codec), bits)


@pytest.mark.parametrize("name", DATA)
def test_sums_by_code_are_the_errors_of_every_element(name):
    found = gauge("group+normal").distortions(item(DATA[name]))[Codec(Granularity.GROUP, "normal")]
    x = sample(DATA[name].flatten(), DATA[name].shape[1])[0]
    for bits in range(9):
        if bits in (0, 4, 8):  # at the others statistics are stored as at these
            back = restored(x, Codec(Granularity.GROUP, "normal"), bits)
            error = float((back - x).square().sum() / x.square().sum())
            assert found[bits] == pytest.approx(error, rel=1e-3), bits


def test_later_the_codecs_that_are_left_are_measured_as_they_are():
    one = item(DATA["normal"])
    best = min(gauge().distortions(one).items(), key=lambda found: found[1][2])[0]
    assert best.fitted is not None
    one.site.distortions = {best: (1.0,) * 9}
    again = gauge().distortions(one)
    assert list(again) == [best] and again[best][8] < again[best][2] < 0.5
    one.site.distortions = {GELU: (1.0,) * 9}  # another reader turned up
    assert GELU not in gauge().distortions(one)


@pytest.mark.parametrize("name", DATA)
def test_the_best_at_few_bits_is_fitted(name):
    found = gauge().distortions(item(DATA[name]))
    assert min(found, key=lambda codec: found[codec][2]).fitted is not None


def test_gelus_input_in_terms_of_its_derivative():
    found = gauge().distortions(item(DATA["normal"] - 0.5, "GeluBackward0.self"))
    private = {codec for codec in found if codec.private}
    assert GELU in private
    assert len(private) == 2  # and the fitted one
    assert min(found, key=lambda codec: found[codec][1]).private


def test_a_small_tensor_is_not_worth_a_codebook():
    rows = FITTED_ELEMENTS // 64
    for kept, fits in ((rows, True), (rows - 1, False)):
        found = gauge().distortions(item(noise(kept, 64)))
        assert any(codec.fitted for codec in found) == fits


def test_nothing_else_than_asked_for_is_measured():
    found = gauge("group+uniform").distortions(item(DATA["normal"], "GeluBackward0.self"))
    assert list(found) == [Codec(Granularity.GROUP, "uniform")]


def test_one_more_beside_the_automatic_ones():
    x = DATA["softmax"] - 0.5  # `root` is not tried by itself where values are negative
    alone, more = (gauge(codec).distortions(item(x)) for codec in ("auto", ("auto", "token+root")))
    named = [codec for codec in more if codec.fitted is None]
    assert named == [*(c for c in alone if c.fitted is None), Codec(Granularity.TOKEN, "root")]
    assert any(codec.fitted for codec in more)


def test_what_cannot_be_measured_has_no_distortions():
    for x in (torch.zeros(64, 64), torch.full((64, 64), float("nan"))):
        assert gauge().distortions(item(x)) == {}


def test_codecs_that_overflow_are_left_out():
    found = gauge().distortions(item(noise(64, 64) * 3e38 / 4))
    assert Codec(Granularity.GROUP, "uniform") not in found


def test_rows_of_a_normalisation_count_alike():
    """An error of the small rows alone is as good as all of the distortion, which is no more than
    that of rows of another direction: they are restored with their own size.
    """
    x = noise(512, 64)
    x[::4] *= 100
    plain, normalised = item(x), item(x)
    normalised.site.normalised = True
    channel, token = (
        Codec(granularity, "uniform") for granularity in (Granularity.CHANNEL, Granularity.TOKEN)
    )
    by_energy, by_rows = (gauge().distortions(each) for each in (plain, normalised))
    assert by_energy[channel][4] < 8 * by_energy[token][4]
    assert by_rows[channel][4] > 100 * by_rows[token][4]
    assert 1 < by_rows[channel][4] < 2
    for codec in (channel, token):
        _, error = gauge().restore(normalised, codec, 4)
        assert by_rows[codec][4] == pytest.approx(error, rel=0.3)
