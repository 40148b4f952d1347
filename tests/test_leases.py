"""Leases: what is to happen at the end of a handle happens once, under the lock."""

from __future__ import annotations

import threading

from daf_hf.leases import DeferredEnds, Lease


def test_lease_ends_once():
    ended = []
    lease = Lease(ended.append, 3)
    again = lease
    del lease
    assert ended == []
    del again
    assert ended == [3]


def test_an_end_that_gets_no_lock_waits_for_its_next_holder():
    lock, ended = threading.Lock(), []
    ends = DeferredEnds(lock)
    end = ends.later(lambda what: ended.append((what, lock.locked())))
    with lock:
        lease = Lease(end, "waits")
        del lease
        assert ended == []
        assert ends.settle()
        assert not ends.settle()
    lease = Lease(end, "at once")
    del lease
    assert ended == [("waits", True), ("at once", True)]
    assert not lock.locked()
