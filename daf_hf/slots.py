"""What saved-tensors hooks packed for the slots of autograd's nodes.

torch 2.13 tells (``SavedTensor.data``). An earlier one can only be asked to unpack a slot, and
others' hooks may run a region of the model again for that. So there the nodes for which our hooks
packed something are noted, by their sequence numbers, and while such a node is asked our unpack
hooks note what they are given, and give nothing. Numbers, which pass by all hooks, are told from
what others' hooks packed by hooks of their own, which can only be given to what has none.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from typing import Any

import torch

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]

READABLE = hasattr(_autograd.SavedTensor, "data")
"""Whether torch tells."""

_NOTES_KEPT = 1 << 16
_NO_NUMBER = (1 << 64) - 1  # of nodes that collect gradients


class _Notes(threading.local):
    """Of a thread, whose nodes have numbers of their own.

    Attributes:
        numbers, earlier: of nodes for which our hooks packed something, the latest ones.
        since: the number of the first node that our hooks could see.
        given: what our unpack hooks are given while a node is asked; None otherwise.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.earlier: set[int] = set()
        self.since = math.inf
        self.given: list[Any] | None = None


_NOTES = _Notes()


def note_scope() -> None:
    """To be called where our hooks are entered: from now on only numbers pass by all hooks."""
    if not READABLE:
        _NOTES.since = _autograd._get_sequence_nr()


def note_packed() -> None:
    """To be called by each of our pack hooks: the node that is being made is one of ours."""
    if not READABLE:
        if len(_NOTES.numbers) >= _NOTES_KEPT:
            _NOTES.numbers, _NOTES.earlier = set(), _NOTES.numbers
        _NOTES.numbers.add(_autograd._get_sequence_nr() - 1)


def telling(unpack: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """An unpack hook of ours that can be asked what it is given."""
    if READABLE:
        return unpack

    @wraps(unpack)
    def told(packed: Any) -> torch.Tensor:
        if _NOTES.given is None:
            return unpack(packed)
        _NOTES.given.append(packed)
        return torch.empty(0)

    return told


def packed_in(node: Any, slot: str) -> list[Any]:
    """What hooks packed for a node's slot: one each tensor of it, none where it was freed."""
    return _read(node, slot) if READABLE else _asked(node, slot)


def slots_of(node: Any) -> list[str]:
    """The slots of a node, by name."""
    return _slots(type(node))


@cache
def _slots(node_type: type) -> list[str]:
    prefix = "_raw_saved_"
    return [name.removeprefix(prefix) for name in dir(node_type) if name.startswith(prefix)]


def _read(node: Any, slot: str) -> list[Any]:
    try:
        raw = getattr(node, f"_raw_saved_{slot}", ())
    except RuntimeError:  # run backward, and freed, in the forward pass
        return []
    found = []
    for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
        with suppress(AttributeError, RuntimeError):  # nothing was saved, or it was freed
            found.append(saved.data)
    return [packed for packed in found if packed is not None]


def _asked(node: Any, slot: str) -> list[Any]:
    number = node._sequence_nr()
    if number not in _NOTES.numbers and number not in _NOTES.earlier:
        return _number_in(node, slot) if _NOTES.since <= number < _NO_NUMBER else []
    written_in_python = isinstance(node, torch._C._FunctionBase)
    _NOTES.given = given = []
    try:
        value = getattr(node, f"saved_{slot}" if written_in_python else f"_saved_{slot}", None)
    except RuntimeError:
        return []
    finally:
        _NOTES.given = None
    return [value] if not given and isinstance(value, torch.Tensor) else given


def _number_in(node: Any, slot: str) -> list[Any]:
    """The number in a slot of a node for which our hooks packed nothing."""
    found: list[Any] = []
    raw: Any = getattr(node, f"_raw_saved_{slot}", None)
    if isinstance(raw, _autograd.SavedTensor):
        with suppress(RuntimeError):  # hooks have packed it, and nobody else's are to be run
            raw.register_hooks(lambda number: found.append(number) or number, telling(_same))
            _NOTES.numbers.add(node._sequence_nr())
    return found


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
