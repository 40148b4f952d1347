"""The governor, told what is left."""

from __future__ import annotations

import gc
import logging
import threading
import time
from dataclasses import replace

import pytest
from tiny import batch, build, compressed, loss_of, nothing_held

from daf_hf import DAFConfig, compress_activations
from daf_hf.governor import STALLED_PAUSE, STEADY_SECONDS, Governor, Watchman
from daf_hf.memory_left import MemoryLeft, Reading

MB = 1e6


class Device:
    """A machine in which we take some memory, and others take some."""

    def __init__(self, total_mb=2000.0):
        self.governor = Governor(500 * MB, 100 * MB)
        self.total, self.others, self.taken = total_mb * MB, 0.0, 0.0
        self.clock, self.step, self.changes = 0.0, 0, 0
        self.reading = Reading(0, "the system")
        self.limit = self.governor.first(self.read(), 0).limit_bytes

    def read(self):
        return replace(self.reading, available=self.total - self.others - self.taken)

    def look(self, seconds=0.1, steps=1):
        self.clock += seconds
        self.step += steps
        self.taken = min(self.taken, self.limit)
        change = self.governor.next(self.read(), self.limit, self.taken, self.clock, self.step)
        if change is not None:
            self.limit, self.changes = change.limit_bytes, self.changes + 1
        return change

    def wait(self, seconds=10 * STEADY_SECONDS):
        for _ in range(int(seconds / 0.1)):
            self.look()


def test_begins_with_what_is_left_but_for_the_headroom():
    assert Device(2050).limit == 1500 * MB
    assert Device(100).limit == 100 * MB  # one step is the least


def test_what_we_take_changes_nothing():
    device = Device()
    for taken in (0, 700, 1500, 300):
        device.taken = taken * MB
        device.wait()
    assert device.changes == 0


def test_falls_at_once_and_says_why():
    device = Device()
    device.others = 730 * MB
    change = device.look()
    assert device.limit == 700 * MB
    assert change.cause == "the system has 1270 MB left, of which 500 are to stay free"


def test_keeps_the_headroom_while_it_is_full():
    device = Device()
    device.taken = device.limit
    for others in range(0, 1400, 70):
        device.others = others * MB
        device.look()
        device.taken = min(device.taken, device.limit)
        assert device.read().available >= 500 * MB


def test_rises_later_and_one_step_short():
    device = Device()
    device.others = 1000 * MB
    device.look()
    device.others = 0
    device.look()
    assert device.limit == 500 * MB
    device.wait()
    assert device.limit == 1400 * MB  # a step more was there all the time


def test_what_comes_and_goes_within_a_step_is_not_given_out():
    device = Device()
    device.others = 1000 * MB
    device.look()
    for _ in range(200):  # a workspace of 400 MB, in half of each training step
        device.others = 400 * MB
        device.look(0.5, 0)
        device.others = 0
        device.look(0.5, 1)
    assert device.limit == 1000 * MB
    assert device.changes == 2


def test_does_not_waver_at_the_edge_of_a_step():
    device = Device()
    for number in range(600):
        device.others = (110 if number % 2 else 90) * MB
        device.look()
    assert (device.limit, device.changes) == (1300 * MB, 2)


def test_long_steps_are_waited_for():
    device = Device()
    device.others = 1000 * MB
    device.look()
    device.others = 0
    for _ in range(100):
        device.look(1.0, 0)
    assert device.limit == 500 * MB


def test_a_group_that_ran_into_its_limit_takes_a_step():
    device = Device()
    device.reading = Reading(0, "the system", events=4)
    assert device.look().cause == "a control group ran into its limit"
    assert device.limit == 1400 * MB
    assert device.look() is None


def test_waiting_tasks_take_a_step_each_ten_seconds():
    device = Device()
    device.reading = Reading(0, "the system", stalled=0.25)
    assert "25% of the last 10 s" in device.look().cause
    device.wait(STALLED_PAUSE / 2)
    assert device.limit == 1400 * MB
    device.wait(STALLED_PAUSE)
    assert device.limit == 1300 * MB


# In a session ------------------------------------------------------------------------------------


@pytest.fixture
def left(monkeypatch):
    """What a machine has left in MB, but for what ``arena`` takes of it, once there is one."""
    state = {"mb": 1.5, "arena": None}

    def read(self):
        arena = state["arena"]
        taken = 0 if arena is None else arena.taken_bytes
        return Reading(state["mb"] * MB - taken, "the test")

    monkeypatch.setattr(MemoryLeft, "read", read)
    monkeypatch.setattr("daf_hf.governor.INTERVAL", 0.005)
    return state


AUTO = {"headroom_mb": 1.0, "budget_step_mb": 0.1}


def wait_for(condition):
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_auto_follows_what_is_left_in_mid_step(left, caplog):
    caplog.set_level(logging.INFO, "daf_hf")
    model, inputs = build("bert"), batch("bert")
    daf, compressor = compressed(model, "auto", **AUTO)
    arena = left["arena"] = compressor.arena
    with daf:
        assert arena.limit_bytes == pytest.approx(0.5 * MB)
        loss = loss_of(model(**inputs))
        left["mb"] = 1.25
        assert wait_for(lambda: arena.limit_bytes == pytest.approx(0.2 * MB))
    loss.backward()
    assert nothing_held(compressor)
    assert "budget inf -> 0.5 MB (the test has 2 MB left" in caplog.text
    assert "budget 0.5 -> 0.2 MB (the test has" in caplog.text


def test_the_thread_ends_with_the_block(left):
    def governors():
        return [t for t in threading.enumerate() if t.name == "daf_hf-governor"]

    model, inputs = build("bert"), batch("bert")
    assert wait_for(lambda: not governors())
    for _ in range(2):
        daf = compress_activations(model, budget_mb="auto", **AUTO)
        with daf:
            loss = loss_of(model(**inputs))
            assert len(governors()) == 1
        time.sleep(0.05)
        assert len(governors()) == 1  # something is held
        loss.backward()
        del loss
        assert wait_for(lambda: not governors())
    with daf:
        daf.set_budget(0.3)
        assert wait_for(lambda: not governors())
        daf.set_budget("auto")
        assert len(governors()) == 1
        assert daf.report.budget_bytes == pytest.approx(0.5 * MB)


def test_a_session_that_nobody_holds_ends_its_thread(left):
    class Owner:
        def look(self):
            return True

    owner = Owner()
    watchman = Watchman(owner.look)
    watchman.start()
    thread = watchman._thread
    del owner
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_options():
    config = DAFConfig(budget_mb=" Auto ", headroom_mb=0)
    assert config.budget_mb == "auto" and config.headroom_mb == 0
    for bad in ({"headroom_mb": -1}, {"budget_step_mb": 0}, {"budget_step_mb": "many"}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}.*use a number of MB"):
            DAFConfig(**bad)
    with pytest.raises(ValueError, match=r"budget_schedule.*use one of the two"):
        DAFConfig(budget_mb="auto", budget_schedule=[(0, 5)])


@pytest.mark.parametrize("headroom_mb", [1.0, 1e9])
def test_a_headroom_that_is_not_there_is_told(headroom_mb, caplog):
    model, inputs = build("bert"), batch("bert")
    daf, compressor = compressed(model, "auto", headroom_mb=headroom_mb, budget_step_mb=1.0)
    with caplog.at_level(logging.WARNING, "daf_hf"), daf:
        loss_of(model(**inputs)).backward()
    assert ("lower headroom_mb" in caplog.text) == (headroom_mb > 1)
    assert compressor.arena.limit_bytes >= 1e6 and nothing_held(compressor)
