"""Keys of save sites that mean the same in another process."""

from __future__ import annotations

from types import CodeType
from typing import Any

Place = tuple[Any, ...]


def place_of(key: Place) -> Place:
    """A site's key (see :mod:`daf_hf.sites`) with the names of its code objects in their place.

    Equal in all processes that run the same code. Applied again it changes nothing.
    """
    return tuple(_portable(part) for part in key)


def _portable(part: Any) -> Any:
    if isinstance(part, tuple):
        return place_of(part)
    if isinstance(part, CodeType):
        return part.co_filename.rpartition("/")[2], part.co_name, part.co_firstlineno
    return part
