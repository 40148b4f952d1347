"""Options: what is taken, what is refused, and how the refusal reads."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import pydoc
from fractions import Fraction

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import daf_hf
from daf_hf import DAFConfig
from daf_hf.codecs import GELU

GOOD = {
    "budget_mb": 12.5,
    "bits": [1, 2, 8],
    "importance": "error",
    "codec": ["auto", "group+uniform"],
    "allocator": "exact",
    "backend": "reference",
    "packing": "host",
    "on_overflow": "spill",
    "calibration_batch": 2,
    "calibrate_at": [0, 5],
    "recalibrate_every": 100,
    "calibration_share": 0.1,
    "time_budget": 0.05,
    "derive": False,
    "include": ["*.attention.*"],
    "exclude": "*.classifier",
    "seed": 3,
}
BAD = [
    ("budget_mb", 0),
    ("budget_mb", -1),
    ("budget_mb", math.nan),
    ("budget_mb", True),
    ("budget_mb", "much"),
    ("budget_mb", None),
    ("budget_mb", [1]),
    ("bits", ()),
    ("bits", (9,)),
    ("bits", (-1,)),
    ("bits", (1.5,)),
    ("bits", "2"),
    ("bits", 4),
    ("bits", (True,)),
    ("importance", "unheard"),
    ("importance", "no.such.module:thing"),
    ("importance", "math:pi"),
    ("importance", 3),
    ("codec", "gelu"),
    ("codec", "group+gauss"),
    ("codec", "no_such_file.py:thing"),
    ("codec", ["auto", "math:pi"]),
    ("codec", []),
    ("codec", 3),
    ("allocator", "best"),
    ("backend", "gpu"),
    ("packing", "cpu"),
    ("on_overflow", "ignore"),
    ("calibration_batch", 0),
    ("calibration_batch", 1.0),
    ("calibrate_at", (-1,)),
    ("calibrate_at", 5),
    ("recalibrate_every", -1),
    ("calibration_share", 0),
    ("derive", 1),
    ("time_budget", 0),
    ("time_budget", "5%"),
    ("calibration_share", 1.5),
    ("calibration_share", True),
    ("calibration_share", math.nan),
    ("budget_mb", 10**400),
    ("importance", ".relative:metric"),
    ("include", ()),
    ("include", 3),
    ("include", (3,)),
    ("exclude", {"a": 1}),
    ("seed", -1),
    ("seed", "0"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_value_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name}=.*(use|cannot be loaded)"):
        DAFConfig(**{name: value})


def test_a_time_budget_needs_an_allocator_that_goes_by_cost():
    with pytest.raises(ValueError, match=r"time_budget=0.1: allocator='uniform' .* use 'greedy'"):
        DAFConfig(time_budget=0.1, allocator="uniform")


def test_unknown_option_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"bugdet_mb.*budget_mb"):
        DAFConfig.build(bugdet_mb=3)


@pytest.mark.parametrize("choice", ["allocator", "backend", "packing", "on_overflow"])
def test_refusal_names_what_is_allowed(choice):
    default = getattr(DAFConfig(), choice)
    with pytest.raises(ValueError, match=default):
        DAFConfig(**{choice: "nonsense"})


def test_importance_refusal_names_the_metrics():
    with pytest.raises(ValueError, match=r"gradient.*magnitude"):
        DAFConfig(importance="unheard")


@pytest.mark.parametrize("text", ["1e400", "9" * 400, "-inf", "nan", "no"])
def test_texts_that_are_no_budget(text):
    with pytest.raises(ValueError, match="use a positive number of MB"):
        DAFConfig(budget_mb=text)


def test_every_option_has_a_help_text():
    for option in dataclasses.fields(DAFConfig):
        assert option.metadata["help"].endswith(".")


def test_defaults():
    config = DAFConfig()
    assert config.budget_bytes == math.inf
    assert config.bits == (0, 1, 2, 3, 4, 5, 6, 8)
    assert (config.importance, config.allocator, config.backend) == ("gradient", "greedy", "auto")
    assert (config.on_overflow, config.calibrate_at) == ("error", (0, 20, 80))


@pytest.mark.parametrize("number", [np.float32(3), np.int64(3), Fraction(3), "3"])
def test_numbers_of_any_kind(number):
    assert DAFConfig(budget_mb=number, calibration_batch=np.int64(3)).budget_mb == 3.0


@pytest.mark.parametrize("text", ["300", "inf", "1e3"])
def test_budget_may_be_text(text):
    assert DAFConfig(budget_mb=text).budget_mb == float(text)


def test_budget_may_be_left_to_the_first_calibration():
    config = DAFConfig(budget_mb="Recommended")
    assert config.budget_mb == "recommended" and config.budget_bytes == math.inf
    assert DAFConfig.from_dict(config.to_dict()) == config


def test_budget_is_in_millions_of_bytes():
    assert DAFConfig(budget_mb=1.5).budget_bytes == 1_500_000


def test_pattern_may_be_one_word():
    assert DAFConfig(exclude="a").exclude == ("a",)


@given(st.lists(st.integers(0, 8), min_size=1))
def test_bits_are_sorted_and_distinct(bits):
    assert DAFConfig(bits=bits).bits == tuple(sorted(set(bits)))


@pytest.mark.parametrize("suffix", ["json", "yaml", "yml"])
def test_file(tmp_path, suffix):
    path = tmp_path / f"daf.{suffix}"
    path.write_text(json.dumps(GOOD) if suffix == "json" else yaml.safe_dump(GOOD))
    assert DAFConfig.from_file(path) == DAFConfig(**GOOD) == DAFConfig.build(str(path))


def test_yaml_knows_infinity(tmp_path):
    path = tmp_path / "daf.yaml"
    path.write_text("budget_mb: .inf\n")
    assert DAFConfig.from_file(path).budget_mb == math.inf


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[1]", "mapping"),
        ("a.json", "{", "not a JSON"),
        ("a.yaml", "- 1", "mapping"),
        ("a.yaml", "a: [", "not a JSON or YAML"),
        ("a.yaml", "", "mapping"),
        ("a.yaml", "budget: 3", "budget"),
        ("a.yaml", "budget_mb: -3", "budget_mb=-3"),
        ("a.yaml", b"\xff\xfe\x00", "a.yaml is not a text file"),
    ],
)
def test_bad_file(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        DAFConfig.build(path)


def test_missing_file():
    with pytest.raises(FileNotFoundError, match="nowhere"):
        DAFConfig.build("nowhere.yaml")


@pytest.mark.parametrize("config", [GOOD, DAFConfig(**GOOD)])
def test_options_replace_those_of_a_config(config):
    built = DAFConfig.build(config, budget_mb=7)
    assert built == DAFConfig(**{**GOOD, "budget_mb": 7})


def test_build_refuses_what_is_no_config():
    with pytest.raises(ValueError, match=r"config=3.*budget_mb=300"):
        DAFConfig.build(3)


def test_dictionary_round_trip():
    config = DAFConfig(**GOOD)
    assert DAFConfig.from_dict(config.to_dict()) == config


def test_config_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DAFConfig().seed = 3


@pytest.mark.parametrize("codec", ["auto", "channel+normal", ("auto", "channel+normal"), GELU])
def test_codec_is_kept_as_given(codec):
    codec = (codec, "normal") if codec is GELU else codec
    assert DAFConfig(codec=codec).to_dict()["codec"] == codec


def test_help_explains_every_option_with_its_default():
    text = " ".join(inspect.getdoc(DAFConfig).partition("Attributes:")[2].split())
    for option in dataclasses.fields(DAFConfig):
        explained = " ".join(option.metadata["help"].split())
        assert f"{option.name}: {explained} Default: {option.default!r}." in text


def test_help_and_dir_of_the_package_name_the_entry_points():
    assert dir(daf_hf) == sorted(daf_hf.__all__)
    text = pydoc.plain(pydoc.render_doc(daf_hf))
    assert "class DAFCallback" in text and "attach(trainer" in text
    for name in ("DAFCallback", "attach", "compress_activations", "DAFConfig"):
        assert name in daf_hf.__all__
        assert name in daf_hf.__doc__
        assert getattr(daf_hf, name).__name__ == name
