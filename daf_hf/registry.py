"""What an option may name: registered objects, entry points of packages, modules, files."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class Registry(Generic[T]):
    """The objects that an option can name.

    Args:
        option: the option's name, for messages.
        group: entry point group in which installed packages offer theirs
            (https://packaging.python.org/en/latest/specifications/entry-points/).
        accepts: whether an object will do.
        expected: what will do, for messages.

    Example:
        >>> shapes = Registry[Callable](option="shape", group="my_package.shapes")
        >>> @shapes.register("round")
        ... def round_one():
        ...     return "o"
        >>> shapes.resolve("round") is round_one
        True
    """

    def __init__(
        self,
        option: str,
        group: str,
        accepts: Callable[[Any], bool] = callable,
        expected: str = "a callable",
    ) -> None:
        self.option = option
        self.group = group
        self._accepts = accepts
        self._expected = expected
        self._objects: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that enters an object under a name.

        Raises:
            ValueError: when the name is taken by another object.
        """

        def enter(thing: T) -> T:
            if self._objects.setdefault(name, thing) is not thing:
                raise ValueError(f"{self.option} {name!r} is registered already: use another name")
            return thing

        return enter

    def names(self) -> list[str]:
        """All names: what is registered, and what installed packages offer."""
        offered = {point.name for point in entry_points(group=self.group)}
        return sorted(offered | self._objects.keys())

    def resolve(self, spec: str | T) -> T:
        """The object that is meant.

        Args:
            spec: the object itself; a name; ``"package.module:object"``; or
                ``"path/to/file.py:object"``, relative to the current directory.

        Raises:
            ValueError: naming the option, the value and what would do.
        """
        if not isinstance(spec, str):
            return self._checked(spec, spec)
        if spec in self._objects:
            return self._objects[spec]
        if ":" in spec:
            head, _, name = spec.rpartition(":")
            return self._loaded(spec, head, lambda: attrgetter(name)(_module(head)))
        for point in entry_points(group=self.group):
            if point.name == spec:
                return self._objects.setdefault(
                    spec, self._loaded(spec, f"the entry point {point.value}", point.load)
                )
        raise ValueError(f"{self.option}={spec!r}: {self._help()}")

    def _loaded(self, spec: str, where: str, load: Callable[[], Any]) -> T:
        try:
            found = load()
        except Exception as error:  # whatever the user's own code raises
            raise ValueError(
                f"{self.option}={spec!r} cannot be loaded from {where} "
                f"({type(error).__name__}: {error}): {self._help()}"
            ) from error
        return self._checked(spec, found)

    def _checked(self, spec: Any, found: Any) -> T:
        if not self._accepts(found):
            raise ValueError(f"{self.option}={spec!r} is not {self._expected}: {self._help()}")
        return cast(T, found)

    def _help(self) -> str:
        return (
            f"use one of {self.names()}, 'package.module:object', 'path/to/file.py:object', or "
            f"{self._expected}"
        )


def _module(head: str) -> ModuleType:
    if not head.endswith(".py"):
        return importlib.import_module(head)
    path = Path(head).resolve()
    return _file(path, path.stat().st_mtime_ns)


@cache
def _file(path: Path, modified: int) -> ModuleType:
    """The module in a file; one that was changed since is executed anew."""
    name = f"_daf_hf_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
