"""What an option may name: registered objects, entry points of packages, modules, files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from .user_objects import load_object, offered

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
        return sorted(offered(self.group) | self._objects.keys())

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
        if ":" not in spec and spec not in self.names():
            raise ValueError(f"{self.option}={spec!r}: {self._help()}")
        try:
            found = load_object(spec, self.group)
        except Exception as error:  # whatever the user's own code raises
            raise ValueError(
                f"{self.option}={spec!r} cannot be loaded ({type(error).__name__}: {error}): "
                f"{self._help()}"
            ) from error
        checked = self._checked(spec, found)
        return checked if ":" in spec else self._objects.setdefault(spec, checked)

    def _checked(self, spec: Any, found: Any) -> T:
        if not self._accepts(found):
            raise ValueError(f"{self.option}={spec!r} is not {self._expected}: {self._help()}")
        return cast(T, found)

    def _help(self) -> str:
        return (
            f"use one of {self.names()}, 'package.module:object', 'path/to/file.py:object', or "
            f"{self._expected}"
        )
