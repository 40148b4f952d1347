"""The option `codec`: what its values stand for, and that sites take what it says."""

from __future__ import annotations

import math
from importlib.metadata import EntryPoint

import pytest
import torch
from tiny import batch, build, compressed, gradients
from torch import nn

from daf_hf import DAFConfig, codebook_from_levels, compress_activations, user_objects
from daf_hf.candidates import resolve_codecs
from daf_hf.codecs import FRUGAL, GELU, GENERAL, RECTIFIED, Codec, uniform
from daf_hf.kernels.format import Granularity
from daf_hf.sites import SaveSite

GELU_INPUT = SaveSite("a/0", "a", consumers={"GeluBackward0.self"})
OTHER = SaveSite("b/0", "b", consumers={"MmBackward0.self"})
OWN = codebook_from_levels("own", [-2.0, -0.5, 0.5, 2.0])
ABSOLUTE = codebook_from_levels("absolute", [-2.0, -0.5, 0.5, 2.0], "none")

LAPLACE = """
import torch
from daf_hf import codebook_from_samples
from daf_hf.codecs import Codec, Granularity

def laplace():
    probabilities = (torch.arange(10_000) + 0.5) / 10_000
    values = torch.distributions.Laplace(0.0, 1.0).icdf(probabilities)
    return codebook_from_samples("laplace", values)

by_token = Codec(Granularity.TOKEN, laplace())
number = 3

def fails():
    raise RuntimeError("out of order")
"""


@pytest.fixture
def laplace(tmp_path):
    path = tmp_path / "laplace.py"
    path.write_text(LAPLACE)
    return path


def names(spec, site=OTHER, rows=64, cols=64, low=-1.0):
    flat = torch.linspace(low, 1.0, rows * cols)
    return [str(codec) for codec in resolve_codecs(spec).at(site, flat, cols)]


# What values stand for --------------------------------------------------------------------------


def test_automatic():
    everywhere = ["uniform", "normal"]
    by = ["group", "tensor", "token", "channel"]
    assert names("auto") == [f"{g}+{book}" for g in by for book in everywhere]
    assert names("auto", low=0.0)[2] == "group+root"
    assert names("auto", GELU_INPUT)[-1] == "gelu"
    assert names("auto", rows=8) == [f"{g}+{book}" for g in by[:3] for book in everywhere]
    assert names("auto", cols=16)[-1] == "channel+normal"
    assert "token+normal" not in names("auto", cols=16)


@pytest.mark.parametrize(
    "reader", ["ReluBackward0.result", "CompiledFunctionBackward.saved_tensors"]
)
def test_zeros_stay_zeros_where_they_are_asked_for(reader):
    site = SaveSite("m/0", "m", consumers={reader, "ConvolutionBackward0.input"})
    by = ["group", "tensor", "token", "channel"]
    assert names("auto", site, low=0.0) == [f"{g}+rectified" for g in by]
    assert "group+uniform" in names("auto", site, low=-1.0)
    assert "group+uniform" in names("auto", OTHER, low=0.0)
    assert resolve_codecs("auto").unplanned(False, rectified=True) == RECTIFIED
    assert resolve_codecs("normal").unplanned(False, rectified=True) != RECTIFIED


def test_one_codec_wherever_and_whatever():
    for site in (GELU_INPUT, OTHER):
        assert names("channel+root", site, rows=2, cols=2) == ["channel+root"]


def test_a_codebook_goes_with_every_granularity():
    assert names("normal") == ["group+normal", "tensor+normal", "token+normal", "channel+normal"]
    assert names(OWN, cols=8) == ["group+own", "tensor+own", "channel+own"]
    assert names(ABSOLUTE) == ["absolute"]


def test_gelu_is_for_gelu():
    assert names(["gelu", "group+uniform"]) == ["group+uniform"]
    assert names(["gelu", "group+uniform"], GELU_INPUT) == ["gelu", "group+uniform"]
    assert names(["group+gelu", "gelu", "group+uniform"], GELU_INPUT) == ["gelu", "group+uniform"]


def test_a_list_says_each_once():
    assert names(["auto", "group+normal", "auto"]) == names("auto")
    assert names(("auto", "token+root")) == [*names("auto"), "token+root"]


@pytest.mark.parametrize(
    "spec", [OWN, lambda: OWN, Codec(Granularity.GROUP, OWN), "own", ["group+own"]]
)
def test_objects(spec, monkeypatch):
    points = [EntryPoint("own", f"{__name__}:OWN", "daf_hf.codecs")]
    monkeypatch.setattr(user_objects, "entry_points", lambda group: points)
    assert names(spec)[0] == "group+own"


def test_a_function_of_daf_hf_gives_its_codebook():
    assert names(uniform)[0] == "group+uniform"


def test_files(laplace):
    assert names(f"{laplace}:laplace") == [
        f"{g}+laplace" for g in ("group", "tensor", "token", "channel")
    ]
    assert names(f"{laplace}:by_token") == ["token+laplace"]
    assert names(f"channel+{laplace}:laplace") == ["channel+laplace"]


def test_a_file_gives_the_same_codebook_each_time(laplace):
    one, other = (DAFConfig(codec=f"{laplace}:laplace") for _ in range(2))
    assert one == other
    assert resolve_codecs(one.codec) == resolve_codecs(other.codec)


def test_what_no_plan_knows():
    automatic = resolve_codecs(["token+root", "auto"])
    assert (automatic.unplanned(False), automatic.unplanned(True)) == (GENERAL, FRUGAL)
    named = resolve_codecs(["gelu", "token+root", "normal"])
    assert named.unplanned(False) == named.unplanned(True) == Codec(Granularity.TOKEN, "root")
    assert resolve_codecs(OWN).unplanned(False) == Codec(Granularity.GROUP, OWN)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gelu", "at least one codec that serves every tensor.*'group.uniform'"),
        (["gelu", GELU], "at least one codec that serves every tensor"),
        ([], "at least one codec"),
        ("binary", "take 'binary' by themselves"),
        ("group+binary", "take 'binary' by themselves"),
        ("row+normal", "cannot be loaded .*'channel', 'group'"),
        ("group+gauss", "cannot be loaded .*'normal'"),
        ("no.such.module:thing", r"cannot be loaded \(No module"),
        ("math:pi", "float is neither a Codec nor a Codebook"),
        (3, "int is neither a Codec nor a Codebook"),
        (Codec(Granularity.GROUP, "gauss"), "no codebook 'gauss'"),
        (lambda: 3, "int is neither"),
        (codebook_from_levels("uniform", [0.0, 1.0]), "'uniform': this is the name of one of"),
    ],
)
def test_what_is_no_codec(spec, message):
    with pytest.raises(ValueError, match=f"^codec=.*{message}") as caught:
        resolve_codecs(spec)
    assert "use " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "int is neither a Codec nor a Codebook"),
        ("fails", "out of order"),
        ("missing", "no attribute 'missing'"),
    ],
)
def test_what_is_no_codec_in_a_file(laplace, name, message):
    with pytest.raises(ValueError, match=f"codec='.*laplace.py:{name}'.*{message}.*: use"):
        DAFConfig(codec=f"{laplace}:{name}")


def test_a_whole_codec_has_its_granularity(laplace):
    with pytest.raises(ValueError, match=r"is a whole codec; leave out 'group\+'"):
        resolve_codecs(f"group+{laplace}:by_token")


# What sites take --------------------------------------------------------------------------------


def taken(daf):
    return {site.codec for site in daf.report.sites} - {"exact", "binary", "derived", "drawn"}


@pytest.mark.parametrize("calibrate_at", [(0,), ()])
@pytest.mark.parametrize("codec", ["group+uniform", "channel+normal"])
def test_one_codec_for_all_sites(codec, calibrate_at):
    model = build("bert")
    daf, compressor = compressed(model, 0.3, codec=codec, calibrate_at=calibrate_at)
    gradients(model, batch("bert"), daf)
    assert taken(daf) == {codec}
    assert compressor.ledger.peak.held <= 3e5


class Heavy(nn.Module):
    """A layer whose input, which is all that is saved, has a Laplace distribution."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 16)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}


def test_a_codec_of_the_users_own_where_it_is_best(laplace):
    x = torch.rand(1024, 64, generator=torch.Generator().manual_seed(0))
    x = torch.distributions.Laplace(0.0, 1.0).icdf(x.clamp(1e-4, 1 - 1e-4))
    model, plain = Heavy(), Heavy()
    spec = ["auto", f"{laplace}:laplace"]
    daf = compress_activations(model, budget_mb=0.1, bits=(2,), codec=spec)
    gradients(model, {"x": x}, daf)
    plain(x)["loss"].backward()
    (site,) = [site for site in daf.report.sites if site.shape == (1024, 64)]
    assert site.codec.endswith("+laplace")
    assert site.bits == 2
    assert daf.report.held_bytes_peak <= 1e5
    assert daf.report.predicted_gradient_error > 0
    gradient, expected = model.layer.weight.grad, plain.layer.weight.grad
    error = float((gradient - expected).norm() / expected.norm())
    assert math.isfinite(error) and 0 < error < 0.5
