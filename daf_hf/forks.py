"""Locks that a forked child finds free, whatever other threads were doing with them."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TypeVar

OUTER, BUDGET, INNER = range(3)
"""In which order threads take several: a fork takes all of them, in the same."""

PATIENCE = 1.0
"""Seconds that a fork waits for each lock: its own thread may hold one."""

LockType = TypeVar("LockType")

_locks: tuple[weakref.WeakSet, ...] = tuple(weakref.WeakSet() for _ in range(3))
_taken = threading.local()


def free_after_fork(lock: LockType, order: int) -> LockType:
    """Have ``os.fork`` wait for a lock, so that what it guards is whole in parent and child.

    Args:
        lock: of :mod:`threading`.
        order: ``OUTER``, ``BUDGET`` or ``INNER``.

    Returns:
        The lock.
    """
    _locks[order].add(lock)
    return lock


def _take() -> None:
    _taken.locks = [
        lock for group in _locks for lock in list(group) if lock.acquire(timeout=PATIENCE)
    ]


def _release() -> None:
    for lock in reversed(_taken.locks):
        lock.release()
    _taken.locks = []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take, after_in_parent=_release, after_in_child=_release)
