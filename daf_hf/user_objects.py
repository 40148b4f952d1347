"""Objects of a user's own, named by text: in a package, in a file, or by an entry point."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from functools import cache
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any


def offered(group: str) -> set[str]:
    """The names of a group's entry points."""
    return {point.name for point in entry_points(group=group)}


def load_object(text: str, group: str) -> Any:
    """What ``"package.module:object"``, ``"file.py:object"`` or an entry point's name stands for.

    A file's path is taken from the current directory; the file is run once, and again only when
    it has changed.

    Args:
        text: the name.
        group: of the entry points.

    Raises:
        LookupError: no entry point is called so.
        Exception: whatever the import raises.
    """
    where, colon, name = text.rpartition(":")
    if not colon:
        for point in entry_points(group=group):
            if point.name == text:
                return point.load()
        raise LookupError(f"no entry point of the group {group!r} is called so")
    if where.endswith(".py"):
        path = Path(where).resolve()
        module = _module(path, path.stat().st_mtime_ns)
    else:
        module = importlib.import_module(where)
    return attrgetter(name)(module)


def text_of(value: Any) -> str:
    """What says the same of the same option in another process: no addresses of objects.

    Two objects of one class, without a representation of their own, cannot be told apart.
    """
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(text_of, value))})"
    if isinstance(value, functools.partial):
        return f"{text_of(value.func)}{text_of(value.args)}{sorted(value.keywords.items())}"
    named = value if hasattr(value, "__qualname__") else type(value)
    if named is value or type(value).__repr__ is object.__repr__:
        return f"{named.__module__}.{named.__qualname__}"
    return repr(value)


@cache
def _module(path: Path, changed: int) -> ModuleType:
    """The module in a file; ``changed`` tells its versions apart."""
    name = f"_daf_hf_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
