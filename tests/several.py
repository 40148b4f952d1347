"""Ranks that are threads of this process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from daf_hf.distributed import Ranks


class Meeting:
    """Where so many threads put down what they have, and see what the others have."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.held = [None] * size

    def all_gather(self, rank, value):
        self.held[rank] = value
        self.barrier.wait()
        found = list(self.held)
        self.barrier.wait()
        return found


class Thread(Ranks):
    """One of them."""

    def __init__(self, meeting, rank):
        self._meeting, self.rank, self.size = meeting, rank, meeting.size

    def largest(self, values):
        return [max(each) for each in zip(*self._all(list(map(float, values))), strict=True)]

    def broadcast(self, value, rank):
        return self._all(value)[rank]

    def _all(self, value):
        return self._meeting.all_gather(self.rank, value)


def on_threads(*works):
    """What ``work(ranks)`` returns, or raises, for as many ranks as there are works."""
    meeting = Meeting(len(works))

    def run(rank):
        try:
            return works[rank](Thread(meeting, rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, range(len(works))))
