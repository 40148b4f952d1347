"""The picture of a plan."""

from __future__ import annotations

import sys

import pytest
from test_budget_plan import plan

from daf_hf.plan_plot import check_plot, save_plot

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml")])
@pytest.mark.parametrize("noise", [0.8, float("nan")])
def test_a_picture_is_written(tmp_path, name, magic, noise):
    check_plot(tmp_path / name)
    save_plot(plan(dropout_error=noise), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_the_marks_are_in_it(tmp_path):
    # Without ids of its own an SVG holds its texts as comments.
    save_plot(plan(), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for label in ("least, 1.0 MB", "recommended, 7.5 MB", "plain training, 100.0 MB"):
        assert label in text
    assert "another dropout seed: 0.8" in text


@pytest.mark.parametrize("name", ["plan.xyz", "plan"])
def test_other_file_types_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name}: use a name .*png"):
        check_plot(name)


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError):
        check_plot("plan.png")
