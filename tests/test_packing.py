"""Packing by a worker: the same bits, never more bytes, whatever the worker does and when."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_saved_tensors import compressor, noise
from tiny import (
    MODELS,
    Watch,
    batch,
    build,
    checkpointing,
    compressed,
    gradients,
    nothing_held,
    same,
    save,
)
from torch import nn
from torch.utils.data import DataLoader

from daf_hf import BudgetError, packing
from daf_hf.arena import PAGE_COST
from daf_hf.codecs import GENERAL
from daf_hf.kernels import get_backend
from daf_hf.packing import Packing

finish_oldest = packing._finish_oldest


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch):
    """Tensors of all sizes are handed over, and end with the test."""
    monkeypatch.setattr(packing, "SMALLEST_BYTES", 1)
    yield
    gc.collect()


def slowly(queue):
    time.sleep(random.random() * 0.003)
    finish_oldest(queue)


WORKERS = {"prompt": finish_oldest, "slow": slowly, "absent": lambda queue: None}


@pytest.fixture(params=WORKERS)
def any_worker(request, monkeypatch):
    monkeypatch.setattr(packing, "_finish_oldest", WORKERS[request.param])


@pytest.fixture
def absent_worker(monkeypatch):
    """Nobody encodes but who needs it."""
    monkeypatch.setattr(packing, "_finish_oldest", WORKERS["absent"])


class Held:
    """Holds the worker up in the middle of encoding, until it is let go."""

    def __init__(self, monkeypatch):
        self.reached, self._go = threading.Event(), threading.Event()
        backend = type(get_backend())
        encode = backend.encode

        def held(*args):
            if threading.current_thread().name.startswith("daf_hf"):
                self.reached.set()
                assert self._go.wait(20)
            return encode(*args)

        monkeypatch.setattr(backend, "encode", held)

    def let_go(self):
        self._go.set()


@pytest.fixture
def held_worker(monkeypatch):
    held = Held(monkeypatch)
    yield held
    held.let_go()


def host(budget_mb=10.0, **options):
    return compressor(budget_mb, packing="host", **options)


def handed_over(daf):
    return len(daf.placement.packer._queue)


# The same bits -----------------------------------------------------------------------------------


def some_steps(name, budget_mb, packing, steps=2, **options):
    """Gradients of a few steps; nothing is ever held beyond the budget."""
    model, inputs = build(name), batch(name, examples=16, tokens=32)
    daf, compressor = compressed(model, budget_mb, packing=packing, **options)
    watch, found = Watch(compressor), []
    for seed in range(steps):
        found.append(gradients(model, inputs, daf, seed=seed))
        daf.step()
    assert max(watch.peak, watch.footprint_peak) <= budget_mb * 1e6
    assert compressor.ledger.peak.held <= budget_mb * 1e6
    assert nothing_held(compressor)
    assert compressor.placement.waiting_bytes == 0
    return found, compressor


@pytest.mark.parametrize(
    ("name", "budget_mb"), [*((name, 0.5) for name in MODELS), ("bert", 1.5), ("conv", 1.5)]
)
def test_gradients_are_those_of_encoding_at_once(name, budget_mb, monkeypatch):
    monkeypatch.setattr(packing, "_finish_oldest", slowly)
    expected, _ = some_steps(name, budget_mb, "device")
    measured, _ = some_steps(name, budget_mb, "host")
    assert all(map(same, measured, expected))


@pytest.mark.parametrize("options", [{"bits": (0, 1, 2)}, {"calibrate_at": ()}], ids=str)
def test_whatever_the_worker_does(options, any_worker):
    expected, at_once = some_steps("bert", 0.4, "device", **options)
    measured, compressor = some_steps("bert", 0.4, "host", **options)
    assert all(map(same, measured, expected))
    assert compressor.arena.demotions == at_once.arena.demotions


def test_auto_on_a_cpu_is_at_once():
    _, compressor = some_steps("bert", 1.0, "auto", steps=1)
    assert compressor.placement.packer is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, any_worker):
    found = []
    for way in ("device", "host"):
        model, inputs = build("bert"), batch("bert")
        checkpointing(model, reentrant)
        daf, held = compressed(model, 0.3, packing=way, calibrate_at=())
        found.append(gradients(model, inputs, daf))
        assert nothing_held(held)
    assert same(*found)


def test_retained_graphs_and_two_forwards(any_worker):
    found = []
    for way in ("device", "host"):
        model, inputs = build("bert"), batch("bert")
        daf, held = compressed(model, 0.5, packing=way)
        torch.manual_seed(0)
        with daf:
            first, second = (model(**inputs)["loss"] for _ in range(2))
        first.backward(retain_graph=True)
        (first + second).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        del first, second
        assert nothing_held(held)
    assert same(*found)


def test_changing_budgets(any_worker):
    def steps(way):
        model, inputs = build("bert"), batch("bert", examples=16, tokens=32)
        daf, held = compressed(model, 1.5, packing=way)
        watch, found = Watch(held), []
        for budget_mb in (1.5, 0.3, 0.8, 0.3):
            daf.set_budget(budget_mb)
            watch.peak = 0
            found.append(gradients(model, inputs, daf))
            assert watch.peak <= held.arena.limit_bytes
            daf.step()
        assert nothing_held(held)
        return found

    assert all(map(same, steps("host"), steps("device")))


def test_a_budget_that_changes_in_mid_pass(any_worker, freed_pages_are_noise):
    found = []
    for daf in (compressor(0.2, bits=(0, 2, 4, 8)), host(0.2, bits=(0, 2, 4, 8))):
        with daf.scope():
            saved = [save(noise(64, 64, seed=i)) for i in range(8)]
            assert daf.set_limit(4e4)
            assert daf.arena.held_bytes <= 4e4
            daf.set_limit(2e5)
            saved += [save(noise(64, 64, seed=i)) for i in range(8, 16)]
        for y, _ in saved:
            y.backward()
        found.append([out[0] for _, out in saved])
        del saved, y
        assert nothing_held(daf)
    assert all(map(torch.equal, *found))


def test_refusals_are_the_same(any_worker):
    errors = []
    for way in ("device", "host"):
        model, inputs = build("bert"), batch("bert", examples=16, tokens=32)
        daf, held = compressed(model, 0.05, packing=way, calibrate_at=())
        with pytest.raises(BudgetError) as caught, daf:
            model(**inputs)
        errors.append(str(caught.value))
        del caught
        gc.collect()
        assert nothing_held(held)
    assert errors[0] == errors[1]


def test_spilling(any_worker):
    options = {"on_overflow": "spill", "calibrate_at": ()}
    expected, at_once = some_steps("bert", 0.05, "device", **options)
    measured, spilled = some_steps("bert", 0.05, "host", **options)
    assert all(map(same, measured, expected))
    assert spilled.ledger.counts == at_once.ledger.counts


def test_two_models_in_two_threads(any_worker):
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(train_without_dropout, ("host", "host")))
    expected = train_without_dropout("device")
    assert all(map(same, found[0], expected))
    assert all(map(same, found[1], expected))


def train_without_dropout(way):
    """Gradients of some steps of a model that draws nothing from the process's generator."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    x = noise(256, 64)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(noise(*parameter.shape, seed=i) / 8)
    daf = compressor(0.1, packing=way, bits=(0, 1, 2, 4))
    found = []
    for _ in range(10):
        model.zero_grad()
        with daf.scope():
            loss = model(x).square().mean()
        loss.backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})
    del loss
    assert nothing_held(daf)
    return found


# Bytes -------------------------------------------------------------------------------------------


def test_what_waits_is_counted(absent_worker):
    x = noise(64, 64)
    daf = host()
    watch = Watch(daf)
    with daf.scope():
        y, out = save(x)
    pages = GENERAL.layout(4096, 64, 8).pages(8)
    assert daf.arena.held_bytes == watch.held() == pages * PAGE_COST + x.nbytes
    assert daf.ledger.peak.exact == daf.placement.waiting_bytes == x.nbytes
    assert daf.ledger.pass_peak == pages * PAGE_COST
    assert daf.held_bytes() == watch.held() == pages * PAGE_COST
    y.backward()
    assert torch.allclose(out[0], x, atol=0.05)
    del y
    assert nothing_held(daf)


def test_the_queue_takes_half_of_the_room(absent_worker):
    daf = host(0.3, bits=(1,))
    watch = Watch(daf)
    saved, waiting = [], 0
    with daf.scope():
        for i in range(100):
            saved.append(save(noise(64, 64, seed=i)))
            waiting = max(waiting, daf.placement.waiting_bytes)
    assert 0.7 * 0.3e6 < waiting < watch.peak <= 0.3e6
    assert handed_over(daf) < len(saved)
    assert daf.arena.demotions == 0
    for y, _ in saved:
        y.backward()
    del saved, y
    assert nothing_held(daf)


def test_what_keeps_more_than_its_own_is_encoded_at_once(absent_worker):
    x = noise(128, 64)
    daf = host()
    with daf.scope():
        saved = save(x[:64])
        assert not handed_over(daf)
        more = save(x[:, ::2])  # a copy that is nobody else's
        assert handed_over(daf) == 1
    del saved, more


def test_small_tensors_are_encoded_at_once(monkeypatch, absent_worker):
    monkeypatch.setattr(packing, "SMALLEST_BYTES", 1 << 16)
    daf = host()
    with daf.scope():
        saved = save(noise(64, 64)), save(noise(128, 128))
    assert handed_over(daf) == 1
    del saved


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_finite_is_kept_exactly(odd, any_worker):
    x = noise(64, 64)
    x[3, 5] = odd
    daf = host()
    watch = Watch(daf)
    with daf.scope():
        y, out = save(x)
    assert daf.held_bytes() == watch.held() == x.nbytes
    assert daf.placement.waiting_bytes == 0
    assert daf.ledger.counts["not_finite"] == 1
    assert {site.placed for site in daf.tracker.sites.values()} == {("exact", None)}
    y.backward()
    assert torch.equal(out[0].view(torch.int32), x.view(torch.int32))
    del y
    assert nothing_held(daf)


def test_elements_go_as_soon_as_they_are_packed(absent_worker):
    daf = host()
    x = noise(64, 64)
    with daf.scope():
        saved = save(x)
    storage = weakref.ref(x.untyped_storage())
    del x
    assert storage() is None or handed_over(daf)
    daf.held_bytes()
    gc.collect()
    assert storage() is None
    del saved


def test_a_packing_says_nothing_until_it_is_read(absent_worker):
    daf = host()
    with daf.scope():
        handle = daf._pack(noise(64, 64))
    assert isinstance(handle.physical, Packing)
    assert handle.physical.place is None
    daf._unpack(handle)
    assert handle.physical.place is not None


# Changes in place --------------------------------------------------------------------------------


def test_a_change_before_it_is_packed_raises(absent_worker):
    x = noise(64, 64)
    with (daf := host()).scope():
        y, _ = save(x)
    assert handed_over(daf) == 1
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    del y
    assert nothing_held(daf)


class Masked(nn.Module):
    """Saves a LayerNorm's input and what follows from it."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)
        self.change = False

    def forward(self, x):
        hidden = self.first(x)
        loss = self.last(self.norm(hidden)).square().mean()
        if self.change:
            hidden.detach().mul_(2)
        return loss


def test_a_change_of_what_others_follow_from_raises(absent_worker):
    torch.manual_seed(0)
    model, x = Masked(), noise(64, 64)
    daf, held = compressed(model, 1.0, packing="host")
    with daf:
        model(x).backward()
        daf.step()
        assert any(site.derived for site in held.tracker.sites.values())
        model.change = True
        loss = model(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, model.last.weight)  # reads the follower alone
    del loss
    assert nothing_held(held)


# Who waits for whom ------------------------------------------------------------------------------


def test_reading_waits_for_its_own_alone(held_worker):
    first, second = noise(64, 64), noise(64, 64, seed=1)
    daf = host()
    with daf.scope():
        y, out = save(first)
        assert held_worker.reached.wait(20)
        z, more = save(second)
    z.backward()
    assert torch.allclose(more[0], second, atol=0.05)
    reader = threading.Thread(target=y.backward)
    reader.start()
    reader.join(0.05)
    assert reader.is_alive() and not out
    held_worker.let_go()
    reader.join(20)
    assert torch.allclose(out[0], first, atol=0.05)
    del y, z, reader
    assert nothing_held(daf)


def test_pages_are_not_free_while_they_are_written(held_worker):
    daf = host()
    watch = Watch(daf)
    with daf.scope():
        saved = save(noise(64, 64))
        assert held_worker.reached.wait(20)
        pages = daf.arena.used_pages
        del saved
        other = save(noise(64, 64, seed=1))
    assert daf.arena.used_pages == 2 * pages
    assert watch.held() == daf.arena.held_bytes
    held_worker.let_go()
    assert daf.held_bytes() == pages * PAGE_COST
    del other
    assert nothing_held(daf)


@pytest.mark.parametrize("change", [lambda daf: daf.set_limit(3e4), lambda daf: daf.release_idle()])
def test_changes_of_the_arena_wait(change, held_worker, freed_pages_are_noise):
    x = noise(64, 64)
    daf = host(bits=(4, 8))
    with daf.scope():
        gone, (y, out) = save(noise(64, 64, seed=1)), save(x)
        assert held_worker.reached.wait(20)
    del gone
    changer = threading.Thread(target=change, args=(daf,))
    changer.start()
    changer.join(0.05)
    assert changer.is_alive()
    held_worker.let_go()
    changer.join(20)
    assert not changer.is_alive()
    y.backward()
    assert torch.allclose(out[0], x, atol=0.3)
    del y
    assert nothing_held(daf)


def test_moving_pages_for_exact_bytes_waits(absent_worker, freed_pages_are_noise):
    daf = host(0.5, bits=(8,))
    with daf.scope():
        saved = [save(noise(64, 64, seed=i)) for i in range(30)]
        daf.held_bytes()
        del saved[::2]
        waiting = save(noise(64, 64, seed=100))
        assert handed_over(daf) == 1
        exact = save(torch.arange(int(daf.arena.room_bytes) // 8 + 8000) << 40)
        assert not handed_over(daf)
    daf.arena.check()
    for (y, out), seed in zip([*saved, waiting], [*range(1, 30, 2), 100], strict=True):
        y.backward()
        assert torch.allclose(out[0], noise(64, 64, seed=seed), atol=0.05)
    del saved, waiting, exact, y
    assert nothing_held(daf)


class Broken(Exception):
    pass


def test_errors_are_raised_where_the_elements_are_read(monkeypatch):
    backend = type(get_backend())
    encode, done = backend.encode, threading.Event()

    def fails(*args):
        if not threading.current_thread().name.startswith("daf_hf") or done.is_set():
            return encode(*args)
        done.set()
        raise error

    error = Broken("in the worker")
    monkeypatch.setattr(backend, "encode", fails)
    daf = host()
    with daf.scope():
        y, _ = save(noise(64, 64))
        assert done.wait(20)
        z, out = save(noise(64, 64, seed=1))
    for _ in range(2):
        with pytest.raises(Broken) as caught:
            y.backward(retain_graph=True)
        assert caught.value is error
    z.backward()
    assert torch.allclose(out[0], noise(64, 64, seed=1), atol=0.05)
    del y, z, caught
    error.__traceback__ = None
    gc.collect()
    assert nothing_held(daf)


def test_an_interrupted_reader_may_try_again(monkeypatch, absent_worker):
    backend = type(get_backend())
    encode, interrupts = backend.encode, [KeyboardInterrupt]

    def interrupted(*args):
        if interrupts:
            raise interrupts.pop()
        return encode(*args)

    monkeypatch.setattr(backend, "encode", interrupted)
    daf = host()
    with daf.scope():
        y, out = save(noise(64, 64))
    with pytest.raises(KeyboardInterrupt):
        y.backward(retain_graph=True)
    y.backward()
    assert torch.allclose(out[0], noise(64, 64), atol=0.05)
    del y
    assert nothing_held(daf)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exceptions_leave_nothing(where, any_worker):
    def fail(*_):
        raise Broken

    model, inputs = build("bert"), batch("bert")
    daf, held = compressed(model, 0.5, packing="host")
    gradients(model, inputs, daf)
    layer = model.base_model.model.bert.encoder.layer[1]
    failing = (
        layer.register_forward_hook(fail)
        if where == "forward"
        else layer.register_full_backward_hook(fail)
    )
    with pytest.raises(Broken) as caught:
        gradients(model, inputs, daf)
    failing.remove()
    del caught
    gc.collect()
    assert nothing_held(held)
    with daf:
        model(**inputs)  # never run backward
    assert nothing_held(held)


# Threads and processes ---------------------------------------------------------------------------


def test_without_a_thread_the_readers_do_it(monkeypatch):
    def no_thread(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", no_thread)
    expected, _ = some_steps("bert", 0.5, "device", steps=1)
    measured, _ = some_steps("bert", 0.5, "host", steps=1)
    assert all(map(same, measured, expected))


def test_the_worker_ends_with_its_packer(collected):
    def workers():
        return [t for t in threading.enumerate() if t.name.startswith("daf_hf")]

    before = set(workers())
    daf = host()
    with daf.scope():
        save(noise(64, 64))
    (worker,) = set(workers()) - before
    daf.held_bytes()  # what is being encoded keeps all of it
    del daf
    gc.collect()
    worker.join(20)
    assert not worker.is_alive()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_lacks_the_worker_and_does_not_miss_it(held_worker):
    x = noise(64, 64)
    daf = host()
    with daf.scope():
        y, out = save(x)
        assert held_worker.reached.wait(20)
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            held_worker.let_go()
            y.backward()
            with daf.scope():
                z, more = save(x + 1)
            z.backward()
            good = torch.allclose(out[0], x, atol=0.05) and torch.allclose(more[0], x + 1, atol=0.1)
            del y, z
            status = 0 if good and nothing_held(daf) else 2
        os._exit(status)
    for _ in range(2000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    held_worker.let_go()
    y.backward()
    assert torch.allclose(out[0], x, atol=0.05)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_loaders_that_fork_while_something_waits(absent_worker):
    daf = host()
    with daf.scope():
        y, out = save(noise(64, 64))
        loader = DataLoader(list(range(4)), num_workers=1, multiprocessing_context="fork")
        assert len(list(loader)) == 4
    y.backward()
    assert torch.allclose(out[0], noise(64, 64), atol=0.05)


def test_the_interpreter_ends_with_work_left():
    script = """
        import torch
        from daf_hf import DAFConfig, packing
        from daf_hf.saved_tensors import Compressor
        packing.SMALLEST_BYTES = 1
        model = torch.nn.Linear(64, 64)
        daf = Compressor(model, DAFConfig(budget_mb=1e3, packing="host"))
        x = torch.randn(1000, 1000, requires_grad=True)
        with daf.scope():
            kept = [(x * i).exp() for i in range(20)]
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# Any order ---------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "save", "work", "read", "drop", "limit", "trim", "exact"]),
        st.integers(0, 7),
    ),
    max_size=40,
)
LIMITS = (1.2e5, 6e4, 9e4, 2e5)


class Pair:
    """One compressor that encodes at once and one with a worker, through the same steps."""

    def __init__(self):
        options = {"bits": (0, 1, 3, 8), "on_overflow": "spill"}
        self.both = [compressor(0.12, **options), host(0.12, **options)]
        self.watch = Watch(self.both[1])
        self.saved = [{}, {}]
        self.serial = 0

    def save(self, choice):
        rows = (8, 64, 100, 130)[choice % 4]
        x = noise(rows, 32, seed=self.serial)
        if choice == 5:
            x[1, 1] = float("nan")
        if choice == 6:
            x = (x > 0).float()
        self.put(x)

    def exact(self, choice):
        self.put(torch.arange(600 * (choice + 1)))

    def put(self, x):
        for daf, saved in zip(self.both, self.saved, strict=True):
            with daf.scope():
                saved[self.serial] = daf._pack(x)
        self.serial += 1

    def read(self, choice):
        key = self.pick(choice)
        if key is not None:
            one, two = (
                daf._unpack(saved[key]) for daf, saved in zip(self.both, self.saved, strict=True)
            )
            assert torch.equal(one.nan_to_num(7.5), two.nan_to_num(7.5))

    def drop(self, choice):
        key = self.pick(choice)
        for saved in self.saved:
            saved.pop(key, None)

    def pick(self, choice):
        keys = list(self.saved[0])
        return keys[choice % len(keys)] if keys else None

    def limit(self, choice):
        limit = LIMITS[choice % len(LIMITS)]
        for daf in self.both:
            daf.set_limit(limit)

    def trim(self, choice):
        for daf in self.both:
            daf.release_idle()

    def work(self, choice):
        """The worker comes round."""
        for _ in range(choice):
            finish_oldest(self.both[1].placement.packer._queue)

    def check(self):
        at_once, later = self.both
        later.placement.packer.finish_all()
        assert self.watch.held() <= later.held_bytes()
        for daf in self.both:
            daf.arena.check()
        assert at_once.arena.demotions == later.arena.demotions


def run(steps, every_moment):
    pair = Pair()
    worker = pair.both[1]
    insert = worker.arena.insert

    def insert_while_the_worker_works(stored):
        if every_moment.random() < 0.3:
            finish_oldest(worker.placement.packer._queue)
        return insert(stored)

    worker.arena.insert = insert_while_the_worker_works
    for name, choice in steps:
        getattr(pair, name)(choice)
        with worker.lock:  # nothing is uncounted between the two
            assert pair.watch.held() <= worker.arena.held_bytes
            assert worker.arena.held_bytes <= max(LIMITS)
    pair.check()
    for choice in range(pair.serial):
        pair.read(choice)
    for saved in pair.saved:
        saved.clear()
    assert all(map(nothing_held, pair.both))
    assert worker.placement.waiting_bytes == 0


@given(STEPS, st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_any_order_of_steps(steps, every_moment):
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(packing, "SMALLEST_BYTES", 1)
        context.setattr(packing, "_finish_oldest", lambda queue: None)
        run(steps, every_moment)


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_steps_with_a_worker_of_its_own_will(seed, monkeypatch, freed_pages_are_noise):
    monkeypatch.setattr(packing, "_finish_oldest", slowly)
    randoms = random.Random(seed)
    names = ["save"] * 4 + ["read", "drop", "limit", "trim", "exact"]
    run([(randoms.choice(names), randoms.randrange(8)) for _ in range(150)], randoms)
