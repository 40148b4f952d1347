"""The spill file."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch

from daf_hf.spill import SpillFile

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
    monkeypatch.setattr(os, "pwrite", lambda *_: 3)
    with pytest.raises(OSError, match=r"wrote 3 of 40 bytes.*Free disk space"):
        spill.write(torch.ones(10))


def test_a_short_file_is_noticed():
    spill = SpillFile()
    place = spill.write(torch.ones(10))
    with pytest.raises(OSError, match="shorter"):
        spill.read(place, torch.empty(100))
