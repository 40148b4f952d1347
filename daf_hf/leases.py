"""What happens at the end of what autograd keeps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Lease:
    """Calls ``end(what)`` once, when the last reference to it goes."""

    __slots__ = ("_end", "_what")

    def __init__(self, end: Callable[[Any], None], what: Any) -> None:
        self._end = end
        self._what = what

    def __del__(self) -> None:
        self._end(self._what)


class DeferredEnds:
    """Runs what is to happen at the end of a handle, while a lock is held.

    Handles die wherever Python drops them, also in a garbage collection while the arena is being
    changed: an end that does not get the lock waits for its next holder.

    Args:
        lock: not reentrant.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._waiting: deque[tuple[Callable[[Any], None], Any]] = deque()

    def later(self, end: Callable[[Any], None]) -> Callable[[Any], None]:
        """``end`` for a :class:`Lease`."""
        lock, waiting = self._lock, self._waiting

        def finish(what: Any) -> None:
            if lock.acquire(blocking=False):
                try:
                    end(what)
                finally:
                    lock.release()
            else:
                waiting.append((end, what))

        return finish

    def settle(self) -> bool:
        """Run what waits; False when nothing did. The caller holds the lock."""
        some = bool(self._waiting)
        while self._waiting:
            end, what = self._waiting.popleft()
            end(what)
        return some
