"""Objects named by text: where they are looked for, and what is missing."""

from __future__ import annotations

import functools
import os
import sys
import types
from importlib.metadata import EntryPoint

import pytest

from daf_hf import user_objects
from daf_hf.user_objects import load_object, text_of

GROUP = "daf_hf.codecs"


def test_in_a_module(monkeypatch):
    module = types.ModuleType("some_objects")
    module.thing = object()
    monkeypatch.setitem(sys.modules, "some_objects", module)
    assert load_object("some_objects:thing", GROUP) is module.thing


def test_in_a_file(monkeypatch, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Thing:\n    x: int = 3\n"
    )
    thing = load_object(f"{path}:Thing", GROUP)
    assert thing().x == 3
    monkeypatch.chdir(tmp_path)
    assert load_object("own.py:Thing", GROUP) is thing


def test_a_file_is_run_again_when_it_has_changed(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("thing = 3\n")
    assert load_object(f"{path}:thing", GROUP) == 3
    path.write_text("thing = 4\n")
    os.utime(path, (0, 0))
    assert load_object(f"{path}:thing", GROUP) == 4


def test_a_file_that_fails_leaves_no_module(tmp_path):
    path = tmp_path / "dividing.py"
    path.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_object(f"{path}:thing", GROUP)
    assert not [name for name in sys.modules if "dividing" in name]


def test_an_entry_point(monkeypatch):
    points = [EntryPoint("pi", "math:pi", GROUP)]
    monkeypatch.setattr(user_objects, "entry_points", lambda group: points)
    assert load_object("pi", GROUP) == pytest.approx(3.14159, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("unheard", LookupError, "no entry point of the group 'daf_hf.codecs'"),
        ("nowhere/own.py:thing", FileNotFoundError, "nowhere"),
        ("math:no_such_thing", AttributeError, "no attribute 'no_such_thing'"),
    ],
)
def test_what_is_missing_is_named(text, kind, message):
    with pytest.raises(kind, match=message):
        load_object(text, GROUP)


@pytest.mark.parametrize("text", ["no_such_module:thing", ":thing", ".relative:thing"])
def test_what_cannot_be_imported(text):
    with pytest.raises((ImportError, ValueError, TypeError)):
        load_object(text, GROUP)


class Metric:
    def __call__(self, site, probe):
        return 1.0

    def method(self, site, probe):
        return 2.0


def test_a_text_holds_no_address():
    values = [
        (lambda: lambda site, probe: 1.0),
        Metric,
        lambda: Metric().method,
        lambda: functools.partial(int, base=3),
        lambda: ("auto", Metric()),
        lambda: ["a", 3, None, 0.5],
        lambda: types.SimpleNamespace(),
    ]
    texts = []
    for make in values:
        one, other = make(), make()
        assert text_of(one) == text_of(other)
        assert "0x" not in text_of(one)
        texts.append(text_of(one))
    assert len(set(texts)) == len(values)
    assert text_of((1, "a")) == text_of([1, "a"])
