"""Options that cannot be, told before anything is loaded."""

from __future__ import annotations


class UsageError(ValueError):
    """Options that do not go together, or values that none can have."""


def require_least(arguments: object, **least: int) -> None:
    """Raise `UsageError` where an option that was given is below its least value."""
    for name, value in least.items():
        given = getattr(arguments, name)
        if given is not None and given < value:
            raise UsageError(f"--{name} {given:g}: use {value} or more")
