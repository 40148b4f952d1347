"""Segments: pages are handed out once, and keep what they hold wherever they are moved."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daf_hf.kernels.format import PAGE_BYTES
from daf_hf.segments import Segments, segment_pages

CPU = torch.device("cpu")
PAGES = 8


def filled(segments, count):
    """A table of so many pages, and what was written to them."""
    table = segments.take(count)
    for place, number in enumerate(table):
        segment = segments.space.segments[number // PAGES]
        segment.view(-1, PAGE_BYTES)[number % PAGES] = place + 1
    return table, segments.read(table)


@pytest.fixture
def calls():
    return []


@pytest.fixture
def segments(calls):
    """Four segments; ``calls`` grows with each warning that something is about to change."""
    segments = Segments(PAGES, CPU, before_change=lambda: calls.append(None))
    for _ in range(4):
        segments.add(PAGES)
    return segments


@pytest.mark.parametrize("budget", [1, 1000, 1e5, 1e6, 1e9, math.inf])
def test_a_segment_is_a_power_of_two_of_pages(budget):
    pages = segment_pages(budget)
    assert pages & (pages - 1) == 0
    assert 64 <= pages <= 4096


def test_pages_are_handed_out_once(segments):
    one, other = segments.take(5), segments.take(20)
    assert len({*one, *other}) == 25
    assert segments.free_pages == 4 * PAGES - 25
    segments.check([one, other])
    with pytest.raises(AssertionError, match="lost or owned twice"):
        segments.check([one])
    segments.give_back(one)
    segments.check([other])


def test_nothing_is_taken_of_no_pages(segments):
    assert list(segments.take(0)) == []
    assert segments.free_pages == 4 * PAGES


def test_what_is_read_is_a_copy(segments):
    table, before = filled(segments, 20)
    segments.read(table).zero_()
    assert torch.equal(segments.read(table), before)
    assert torch.equal(segments.read(table[::-1]), before.flip(0))
    assert before[:, 0].tolist() == list(range(1, 21))


@pytest.mark.parametrize("pages", [1, 8, 9, 16])
def test_released_segments_leave_what_is_held_as_it_was(segments, calls, pages):
    """Also where free pages are spread over all segments."""
    held = [filled(segments, 4) for _ in range(8)]
    for table, _ in held[::2]:
        segments.give_back(table)
    kept = held[1::2]
    tables = [table for table, _ in kept]
    taken = segments.nbytes
    assert segments.release(pages * PAGE_BYTES, tables)
    segments.check(tables)
    assert segments.nbytes <= taken - pages * PAGE_BYTES
    assert segments.nbytes == sum(s.nbytes for s in segments.space.segments if s is not None)
    assert all(torch.equal(segments.read(table), before) for table, before in kept)
    assert calls


OPERATIONS = st.tuples(
    st.sampled_from(["take", "take", "give", "release", "trim"]), st.sampled_from([1, 3, PAGES, 20])
)


@given(st.lists(OPERATIONS, min_size=8))
def test_whatever_is_done_pages_are_held_once_and_keep_what_they_hold(operations):
    segments, kept = Segments(PAGES, CPU), []
    for what, number in operations:
        tables = [table for table, _ in kept]
        if what == "take":
            while segments.free_pages < number:
                segments.add(min(PAGES, number - segments.free_pages))
            kept.append(filled(segments, number))
        elif what == "give" and kept:
            segments.give_back(kept.pop(number % len(kept))[0])
        elif what == "release":
            free, taken = segments.free_pages, segments.nbytes
            assert segments.release(number * PAGE_BYTES, tables) is (number <= free)
            if number <= free:
                assert segments.nbytes <= taken - number * PAGE_BYTES
        elif what == "trim":
            segments.trim()
        segments.check([table for table, _ in kept])
        assert all(torch.equal(segments.read(table), before) for table, before in kept)


def test_more_than_is_free_cannot_be_released(segments):
    table, before = filled(segments, 30)
    assert not segments.release(3 * PAGE_BYTES, [table])
    segments.check([table])
    assert torch.equal(segments.read(table), before)


def test_only_empty_segments_are_trimmed(segments, calls):
    table, before = filled(segments, PAGES + 1)
    segments.trim()
    segments.check([table])
    assert segments.nbytes == 2 * PAGES * PAGE_BYTES
    assert len(calls) == 1
    segments.trim()
    assert len(calls) == 1
    assert torch.equal(segments.read(table), before)


def test_a_trimmed_place_is_taken_again(segments):
    segments.trim()
    assert segments.nbytes == segments.free_pages == 0
    segments.add(3)
    assert len(segments.space.segments) == 4
    assert segments.nbytes == 3 * PAGE_BYTES
    assert sorted(segments.take(3)) == [0, 1, 2]


def test_idle_segments_are_trimmed_when_many_pages_became_free(segments):
    table = segments.take(4 * PAGES)
    segments.trim()
    segments.give_back(table[-1:])
    del table[-1:]
    segments.trim_if_idle()
    assert segments.nbytes == 4 * PAGES * PAGE_BYTES
    segments.give_back(table)
    segments.trim_if_idle()
    assert segments.nbytes == 0


def test_segments_are_pinned_where_asked_for(monkeypatch):
    asked, empty = [], torch.empty

    def noting(*args, pin_memory=False, **options):
        asked.append(pin_memory)
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", noting)
    for pinned in (True, False):
        segments = Segments(PAGES, CPU, pinned=pinned)
        segments.add(4)
        segments.trim_if_idle()  # pinned ones stay: giving them back waits for the device
        assert bool(segments.nbytes) == pinned
    assert asked == [True, False]
