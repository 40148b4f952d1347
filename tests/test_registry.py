"""What an option may name, and how a refusal reads."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from importlib.metadata import EntryPoint

import pytest

from daf_hf import user_objects
from daf_hf.registry import Registry


def thing():
    return "thing"


@pytest.fixture
def things():
    return Registry(option="thing", group="daf_hf.no_such_group")


@pytest.fixture
def offered(monkeypatch):
    """Entry points of a package that is not installed."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(
        user_objects, "entry_points", lambda group: [p for p in points if p.group == group]
    )
    module = types.ModuleType("some_things")
    module.thing, module.other = thing, lambda: "other"
    monkeypatch.setitem(sys.modules, "some_things", module)
    return lambda name, value: points.append(EntryPoint(name, value, "daf_hf.no_such_group"))


def test_a_registered_name(things):
    assert things.register("mine")(thing) is thing
    assert things.resolve("mine") is thing
    assert things.names() == ["mine"]


def test_a_name_is_registered_once(things):
    things.register("mine")(thing)
    things.register("mine")(thing)
    with pytest.raises(ValueError, match="thing 'mine' is registered already"):
        things.register("mine")(len)


def test_an_object_stands_for_itself(things):
    assert things.resolve(thing) is thing


def test_a_path_in_a_package(things):
    assert things.resolve("os.path:join") is os.path.join
    assert things.resolve("collections:OrderedDict.fromkeys") is not None


def test_an_entry_point_is_found_by_name(things, offered):
    offered("theirs", "some_things:thing")
    assert things.resolve("theirs") is thing
    assert things.names() == ["theirs"]
    with pytest.raises(ValueError, match="'theirs' is registered already"):
        things.register("theirs")(len)


def test_what_is_registered_goes_before_entry_points(things, offered):
    things.register("mine")(thing)
    offered("mine", "some_things:other")
    assert things.resolve("mine") is thing


def test_an_entry_point_is_loaded_only_when_named(things, offered):
    offered("broken", "no_such_package:thing")
    things.register("mine")(thing)
    assert things.resolve("mine") is thing
    with pytest.raises(
        ValueError, match=r"'broken' cannot be loaded \(ModuleNotFoundError: .*no_such"
    ):
        things.resolve("broken")


FILE = """\
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Kept:
    value: int

def thing():
    return Kept(VALUE)
"""


def test_a_file_outside_any_package(things, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE.replace("VALUE", "1"))
    monkeypatch.chdir(tmp_path)
    found = things.resolve("mine.py:thing")
    assert dataclasses.asdict(found()) == {"value": 1}
    assert things.resolve(f"{tmp_path}/mine.py:thing") is found
    assert str(tmp_path) not in sys.path


def test_a_file_that_was_changed_is_read_again(things, tmp_path):
    path = tmp_path / "mine.py"
    for value in (1, 2):
        path.write_text(FILE.replace("VALUE", str(value)))
        os.utime(path, ns=(value, value))
        assert things.resolve(f"{path}:thing")().value == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "FileNotFoundError"),
        ("def thing(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("other = len", "AttributeError"),
    ],
)
def test_a_bad_file_is_named(things, tmp_path, text, reason):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    before = set(sys.modules)
    with pytest.raises(ValueError, match=rf"{path}:thing' cannot be loaded \({reason}: .*use one"):
        things.resolve(f"{path}:thing")
    if reason != "AttributeError":
        assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("unheard", r"thing='unheard': use one of \['mine'\].*path/to/file.py:object"),
        ("no_such_module:x", "cannot be loaded .*no_such_module"),
        ("math:no_such_thing", "cannot be loaded"),
        ("math:pi", "not a callable"),
        (":x", "cannot be loaded"),
        ("math:", "cannot be loaded"),
        (None, "thing=None is not a callable"),
    ],
)
def test_a_refusal_names_the_option_and_what_would_do(things, spec, message):
    things.register("mine")(thing)
    with pytest.raises(ValueError, match=message):
        things.resolve(spec)


def test_what_does_may_be_other_than_callable():
    numbers = Registry(
        "number", "daf_hf.no_such_group", lambda found: isinstance(found, float), "a float"
    )
    assert numbers.resolve("math:pi") > 3
    with pytest.raises(ValueError, match="number='math:sqrt' is not a float"):
        numbers.resolve("math:sqrt")
