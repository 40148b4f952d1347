"""A forked child finds no lock taken."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
import torch
from tiny import batch, build, compressed, gradients, loss_of

from daf_hf import forks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no os.fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


def in_a_child(work):
    """Whether ``work`` ends in a forked child, within ten seconds."""
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            thread.join(10)
            status = int(thread.is_alive())
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_trains_while_another_thread_changed_the_budget():
    torch.set_num_threads(1)
    model, inputs = build("bert"), batch("bert")
    daf, _ = compressed(model, 0.3)
    gradients(model, inputs, daf)
    ended = threading.Event()

    def change():
        while not ended.is_set():
            daf.set_budget(0.3)

    def train():
        with daf:
            loss_of(model(**inputs)).backward()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        assert all(in_a_child(train) for _ in range(8))
    finally:
        ended.set()
        thread.join()


def test_a_fork_waits_for_whoever_holds_a_lock():
    lock = forks.free_after_fork(threading.Lock(), forks.INNER)
    entered = threading.Event()

    def hold():
        with lock:
            entered.set()
            threading.Event().wait(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    assert in_a_child(lambda: lock.acquire(timeout=5) and lock.release())
    thread.join()
    assert not lock.locked()


def test_a_fork_by_the_holder_of_a_lock_goes_on(monkeypatch):
    monkeypatch.setattr(forks, "PATIENCE", 0.01)
    lock = forks.free_after_fork(threading.Lock(), forks.INNER)
    with lock:
        assert in_a_child(lambda: None)
    assert not lock.locked()
