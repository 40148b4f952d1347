"""The spill file."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap

import pytest
import torch
from tiny import (
    batch,
    build,
    compressed,
    gradients,
    loss_of,
    nothing_held,
    relative_error,
    same,
)

from daf_hf import BudgetError, DAFConfig
from daf_hf.codecs import Codec
from daf_hf.kernels.format import PAGE_BYTES, Granularity
from daf_hf.saved_tensors import Compressor
from daf_hf.spill import Parcel, SpillFile

MODEL = torch.nn.Linear(8, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)


def size(spill):
    return os.fstat(spill._descriptor).st_size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip(dtype):
    spill = SpillFile()
    first, second = torch.randn(100).to(dtype), torch.randn(7).to(dtype)
    places = [spill.write(first), spill.write(second)]
    for tensor, place in zip((first, second), places, strict=True):
        out = torch.empty_like(tensor)
        spill.read(place, out)
        assert torch.equal(out, tensor)


def test_file_is_emptied_when_nothing_is_alive():
    spill = SpillFile()
    places = [spill.write(torch.ones(1000)) for _ in range(3)]
    for place in places[:2]:
        spill.forget(place)
    assert size(spill) == 12_000
    spill.forget(places[2])
    assert size(spill) == 0
    assert spill.write(torch.ones(10)) == 0


def test_file_is_made_when_needed_and_ends_with_its_owner(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(os.listdir("/proc/self/fd"))
    spill = SpillFile()
    assert set(os.listdir("/proc/self/fd")) == before
    spill.write(torch.ones(10))
    assert not list(tmp_path.iterdir())  # it has no name
    descriptor = spill._descriptor
    del spill
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(OSError, match=r"cannot spill 40 bytes.*gone.*TMPDIR"):
        SpillFile().write(torch.ones(10))


def test_a_full_disk_is_explained(monkeypatch):
    spill = SpillFile()
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match=r"wrote 0 of 40 bytes.*Free disk space"):
        spill.write(torch.ones(10))


def test_a_short_file_is_noticed():
    spill = SpillFile()
    place = spill.write(torch.ones(10))
    with pytest.raises(OSError, match="shorter"):
        spill.read(place, torch.empty(100))


def test_the_file_ends_with_the_last_thing_alive():
    spill = SpillFile()
    places = [spill.write(torch.full((1000,), float(n))) for n in range(3)]
    spill.forget(places[2])
    assert size(spill) == 8_000
    assert spill.write(torch.ones(500)) == 8_000
    out = torch.empty(1000)
    spill.read(places[1], out)
    assert bool((out == 1).all())


def test_what_was_written_before_is_asked_for_meanwhile(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *extent: asked.append(extent[:2]))
    spill = SpillFile()
    places = [spill.write(torch.ones(1000)) for _ in range(4)]
    spill.forget(places[1])
    for place in (places[3], places[2], places[0]):
        spill.read(place, torch.empty(1000))
    assert asked == [(8000, 4000), (0, 4000)]


def test_the_limit_counts_file_and_host_memory():
    spill = SpillFile(10_000)
    parcel = Parcel(torch.ones(1000), spill)
    spill.hold(4000)
    assert spill.fits(2000) and not spill.fits(2001)
    out = torch.empty(1000)
    parcel.read(out)
    assert bool((out == 1).all())
    del parcel
    spill.hold(-4000)
    assert spill.fits(10_000) and size(spill) == 0


def daf_of(budget_mb, on_overflow, **options):
    """Compression outside of any model's pass."""
    config = DAFConfig.build(budget_mb=budget_mb, on_overflow=on_overflow, **options)
    return Compressor(MODEL, config)


# Planes ------------------------------------------------------------------------------------------


def training(budget_mb, **options):
    model, inputs = build("bert"), batch("bert")
    daf, compressor = compressed(model, budget_mb, **{"calibrate_at": (0,), **options})
    gradients(model, inputs, daf)
    daf.step()
    return model, inputs, daf, compressor


def with_a_fall(model, inputs, daf, budget_mb):
    """Gradients of a step in which the budget falls between forward and backward."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    with daf:
        loss = loss_of(model(**inputs))
    if budget_mb is not None:
        daf.set_budget(budget_mb)
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packing", ["device", "host"])
def test_planes_that_make_room_are_not_lost(packing, freed_pages_are_noise):
    model, inputs, daf, compressor = training(0.15, on_overflow="spill", packing=packing)
    expected = with_a_fall(model, inputs, daf, None)
    measured = with_a_fall(model, inputs, daf, 0.12)
    assert compressor.arena.limit_bytes == 0.12e6
    assert compressor.ledger.counts["spilled"] > 0
    assert same(measured, expected)
    assert nothing_held(compressor)


def test_when_spill_mb_is_used_up_planes_are_dropped():
    model, inputs, daf, compressor = training(0.15, on_overflow="spill", spill_mb=0.004)
    expected = with_a_fall(model, inputs, daf, None)
    measured = with_a_fall(model, inputs, daf, 0.12)
    assert not same(measured, expected)
    assert relative_error(measured, expected) < 1
    assert compressor.placement._spill._end == 0
    assert nothing_held(compressor)


def test_dropped_planes_take_those_with_them_that_were_spilled_before():
    """Else what is left would be read as codes of another width."""
    x = torch.randn(4 * 8192)
    planes = Codec(Granularity.GROUP, "uniform").layout(x.numel(), 1, 8).plane_pages * PAGE_BYTES
    alone = daf_of(math.inf, "error")
    both = daf_of(math.inf, "spill", spill_mb=2 * planes / 1e6)
    handles = {}
    for daf in (alone, both):
        daf.set_limit(1e9)
        with daf.scope():
            handles[daf] = daf._pack(x)
    spilled = []
    for held in range(int(both.arena.held_bytes), 0, -planes // 2):
        if not both.set_limit(held):
            break
        spilled.append(max(s.whole_bits - s.bits for s in both.arena._live))
        bits = max(s.whole_bits for s in both.arena._live)
        while max(s.bits for s in alone.arena._live) > bits:
            alone.set_limit(alone.arena.held_bytes - planes / 2)
        assert torch.equal(both._unpack(handles[both]), alone._unpack(handles[alone]))
    assert max(spilled) == 2 and spilled[-1] == 0


def test_no_room_anywhere_is_refused():
    model, inputs = build("bert"), batch("bert")
    daf, _ = compressed(model, 0.01, on_overflow="spill", spill_mb=0.01)
    with pytest.raises(BudgetError, match="spill_mb"), daf:
        model(**inputs)


def test_a_disk_that_is_full_in_mid_fall_leaves_all_in_place(monkeypatch):
    model, inputs, daf, compressor = training(0.15, on_overflow="spill")
    with daf:
        loss = loss_of(model(**inputs))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=r"No space left.*TMPDIR"):
            daf.set_budget(0.12)
    compressor.arena.check()
    daf.set_budget(0.12)
    loss.backward()
    assert nothing_held(compressor)


def test_a_killed_process_leaves_no_file(tmp_path):
    code = (
        "import os, signal, torch; from daf_hf.spill import SpillFile\n"
        "spill = SpillFile(); spill.write(torch.ones(1000)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_what_outlives_the_file_touches_no_other(tmp_path):
    """At the process's end the file is closed first, and another one may get its number."""
    code = """
        import atexit, sys
        def late():
            global files
            files = [open(f"{sys.argv[1]}/{n}", "wb", buffering=0) for n in range(4)]
            for file in files:
                file.write(b"x" * 1000)
        atexit.register(late)  # before the spill file's end is: it runs after that
        import torch
        from daf_hf.spill import Parcel, SpillFile
        spill = SpillFile()
        parcels = [Parcel(torch.ones(n), spill) for n in (10, 1000)]
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, encoding="utf-8", timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [1000] * 4


def test_what_has_no_elements_takes_no_place():
    """Not even that of what is written next."""
    spill = SpillFile()
    empty, kept = Parcel(torch.empty(0), spill), Parcel(torch.arange(4.0), spill)
    empty.read(torch.empty(0))
    del empty
    other, out = Parcel(torch.full((4,), 9.0), spill), torch.empty(4)
    kept.read(out)
    assert torch.equal(out, torch.arange(4.0))
    del kept
    other.read(out)
    assert torch.equal(out, torch.full((4,), 9.0))


def test_more_than_is_written_or_read_at_a_time(monkeypatch):
    """Linux moves at most 2 GiB."""
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:999], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: read(fd, [into[0][:777]], at))
    spill, x, out = SpillFile(), torch.randn(1000), torch.empty(1000)
    spill.read(spill.write(x), out)
    assert torch.equal(out, x)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no os.fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_file_alone():
    model, inputs, daf, compressor = training(0.15, on_overflow="spill")
    expected = with_a_fall(model, inputs, daf, 0.12)
    daf.set_budget(0.15)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    with daf:
        loss = loss_of(model(**inputs))
    daf.set_budget(0.12)
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            try:
                loss.backward(retain_graph=True)
            except RuntimeError as error:
                status = 0 if "before a fork" in str(error) else 2
            del loss
            gc.collect()
            daf.set_budget(0.15)
            with daf:
                loss = loss_of(model(**inputs))
            daf.set_budget(0.12)  # spills to a file of its own
            loss.backward()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loss.backward()
    measured = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert same(measured, expected)
    assert nothing_held(compressor)


def test_a_disk_that_is_full_leaves_nothing_counted(monkeypatch):
    """What was to be held exactly, and for which others were to be spilled."""
    daf, outer = daf_of(1.0, "spill"), torch.randn(65536)

    def full(*_):
        raise OSError(28, "No space left on device")

    with daf.scope(), monkeypatch.context() as patch:
        first = daf._pack(torch.randn(65536))
        daf.set_limit(outer.nbytes + 1000)
        patch.setattr(os, "pwrite", full)
        patch.setattr(daf.placement, "_may_quantize", lambda *_: False)
        patch.setattr(daf.placement.giving_way, "way", lambda *_: None)
        with pytest.raises(OSError, match="No space left"):
            daf._pack(outer)
    assert not daf.ledger.is_held_exactly(outer.untyped_storage()._cdata)
    del first
    assert nothing_held(daf)
