"""The arena: pages, budget, demotion and compaction, under every order of operations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from daf_hf.arena import PAGE_COST, Arena
from daf_hf.codecs import BINARY, GENERAL
from daf_hf.kernels.format import PAGE_BYTES
from daf_hf.stored import PAGE_ELEMENTS, Stored

WIDTHS = (0, 1, 2, 4, 8)


def stored(pages=1, bits=4, widths=WIDTHS, importance=1.0):
    """An activation whose planes take so many pages."""
    layout = GENERAL.layout(pages * PAGE_ELEMENTS, 256, 8)
    costs = tuple(importance * 4.0**-b for b in range(9))
    return Stored(layout, bits, widths, costs)


def page(arena, number):
    per = arena.space.pages_per_segment
    return arena.space.segments[number // per].view(-1, PAGE_BYTES)[number % per]


def fill(arena, item, value):
    for place, number in enumerate(item.table):
        page(arena, number).fill_((value + place) % 251)


def holds(arena, item, value):
    return all(
        bool((page(arena, number) == (value + place) % 251).all())
        for place, number in enumerate(item.table)
    )


class ArenaMachine(RuleBasedStateMachine):
    """Everything that can be done to an arena, in any order.

    The model is a dictionary from what is stored to the value that its pages are filled with.
    """

    def __init__(self):
        super().__init__()
        self.arena = Arena(300 * PAGE_COST)
        self.contents = {}
        self.outside = []
        self.serial = 0

    @rule(
        pages=st.integers(1, 12),
        bits=st.sampled_from(WIDTHS),
        importance=st.floats(0.1, 10),
        lossless=st.booleans(),
    )
    def insert(self, pages, bits, importance, lossless):
        item = stored(pages, bits, importance=importance)
        if lossless:
            item = Stored(BINARY.layout(pages * PAGE_ELEMENTS, 256, 1), 1, (1,), ())
        needed = item.layout.pages(item.bits)
        held, fitted = self.arena.held_bytes, self.arena.fits(needed)
        inserted = self.arena.insert(item)
        assert inserted == fitted
        if inserted:
            assert len(item.table) == needed
            self.serial += 1
            fill(self.arena, item, self.serial)
            self.contents[item] = self.serial
        else:
            assert self.arena.held_bytes == held
            assert not item.table

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def remove(self, data):
        item = data.draw(st.sampled_from(list(self.contents)))
        self.arena.remove(item)
        del self.contents[item]

    @precondition(lambda self: math.isfinite(self.arena.cheapest_demotion()))
    @rule()
    def demote(self):
        scores = {item: item.demotion_score() for item in self.contents}
        widths = {item: item.bits for item in self.contents}
        assert self.arena.cheapest_demotion() == min(scores.values())
        used = self.arena.used_pages
        self.arena.demote_cheapest()
        (victim,) = (item for item in self.contents if item.bits != widths[item])
        assert scores[victim] == min(scores.values())
        assert victim.bits == max(w for w in WIDTHS if w < widths[victim])
        freed = (widths[victim] - victim.bits) * victim.layout.plane_pages
        assert self.arena.used_pages == used - freed

    @rule(nbytes=st.integers(0, 100 * PAGE_COST))
    def reserve_outside(self, nbytes):
        before, fitted = self.arena.outside_bytes, self.arena.fits(0, nbytes)
        reserved = self.arena.reserve_outside(nbytes)
        assert reserved == fitted
        if reserved:
            self.outside.append(nbytes)
        else:
            assert self.arena.outside_bytes == before

    @precondition(lambda self: self.outside)
    @rule(data=st.data())
    def release_outside(self, data):
        index = data.draw(st.integers(0, len(self.outside) - 1))
        self.arena.release_outside(self.outside.pop(index))

    @rule(pages=st.one_of(st.integers(1, 600), st.just(math.inf)))
    def set_limit(self, pages):
        within = self.arena.set_limit(pages * PAGE_COST)
        assert within == (self.arena.held_bytes <= pages * PAGE_COST)
        if not within:
            assert math.isinf(self.arena.cheapest_demotion())
            assert self.arena.taken_bytes == self.arena.held_bytes
            # What is above the limit may only end; so it does here.
            for item in list(self.contents):
                self.arena.remove(item)
            self.contents.clear()
            while self.outside:
                self.arena.release_outside(self.outside.pop())
            self.arena.set_limit(pages * PAGE_COST)

    @rule()
    def trim(self):
        self.arena.trim()

    @invariant()
    def consistent(self):
        self.arena.check()

    @invariant()
    def within_the_limit(self):
        assert self.arena.held_bytes <= self.arena.limit_bytes
        segments = sum(s.nbytes for s in self.arena.space.segments if s is not None)
        tables = sum(len(item.table) * 4 for item in self.contents)
        assert segments == self.arena.reserved_bytes
        assert segments + tables + sum(self.outside) <= self.arena.limit_bytes

    @invariant()
    def contents_survive(self):
        assert len(self.arena) == len(self.contents)
        assert all(holds(self.arena, item, value) for item, value in self.contents.items())

    @invariant()
    def counts_what_is_held(self):
        pages = sum(len(item.table) for item in self.contents)
        assert self.arena.stored_bytes == pages * PAGE_COST
        assert self.arena.held_bytes == pages * PAGE_COST + sum(self.outside)


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=40, stateful_step_count=30)


def test_insert_fills_the_budget_to_the_last_page():
    item = stored(1, 8)
    pages = item.layout.pages(8)
    arena = Arena(3 * pages * PAGE_COST)
    assert all(arena.insert(stored(1, 8)) for _ in range(3))
    assert arena.held_bytes == arena.limit_bytes
    assert not arena.insert(stored(1, 1))


def test_a_freed_page_is_used_again():
    arena = Arena(100 * PAGE_COST)
    first = stored(2, 8)
    arena.insert(first)
    pages, reserved = set(first.table), arena.reserved_bytes
    arena.remove(first)
    second = stored(2, 8)
    arena.insert(second)
    assert set(second.table) == pages
    assert arena.reserved_bytes == reserved


def test_demotion_takes_the_least_cost_per_page_first():
    arena = Arena(math.inf)
    dear, cheap = stored(importance=100.0), stored(importance=1.0)
    arena.insert(dear)
    arena.insert(cheap)
    arena.demote_cheapest()
    assert (dear.bits, cheap.bits) == (4, 2)


def test_demotion_stops_at_the_floor():
    arena = Arena(math.inf)
    item = stored(bits=2, widths=(1, 2))
    arena.insert(item)
    arena.demote_cheapest()
    assert item.bits == 1
    assert math.isinf(arena.cheapest_demotion())


def test_demotion_keeps_the_leading_pages():
    arena = Arena(math.inf)
    item = stored(3, 8)
    arena.insert(item)
    fill(arena, item, 5)
    table = list(item.table)
    arena.demote_cheapest()
    assert list(item.table) == table[: item.layout.pages(4)]
    assert holds(arena, item, 5)


def test_shrinking_gives_segments_back_and_keeps_contents():
    arena = Arena(2000 * PAGE_COST)
    items = [stored(10, 8) for _ in range(20)]
    for value, item in enumerate(items):
        arena.insert(item)
        fill(arena, item, value)
    for item in items[::2]:  # holes everywhere
        arena.remove(item)
    reserved = arena.reserved_bytes
    assert arena.set_limit(1000 * PAGE_COST)
    arena.check()
    assert arena.reserved_bytes < reserved
    assert arena.reserved_bytes <= 1000 * PAGE_COST
    assert all(item.bits == 8 and holds(arena, item, i) for i, item in enumerate(items) if i % 2)


def test_shrinking_below_what_is_live_demotes():
    arena = Arena(2000 * PAGE_COST)
    items = [stored(10, 8) for _ in range(10)]
    assert all(arena.insert(item) for item in items)
    assert arena.set_limit(arena.held_bytes / 2)
    arena.check()
    assert any(item.bits < 8 for item in items)
    assert arena.held_bytes <= arena.limit_bytes


def test_shrinking_below_the_floor_says_so():
    arena = Arena(2000 * PAGE_COST)
    arena.insert(stored(10, 8, widths=(8,)))
    held = arena.held_bytes
    assert not arena.set_limit(held / 2)
    assert arena.held_bytes == held
    assert not arena.insert(stored(1, 0))


def test_exact_bytes_take_the_room_of_free_segments():
    arena = Arena(1000 * PAGE_COST)
    item = stored(50, 8)
    arena.insert(item)
    arena.remove(item)
    assert arena.reserved_bytes > 0
    assert arena.reserve_outside(1000 * PAGE_COST)
    assert arena.reserved_bytes == 0


def test_growing_again_reuses_the_place_of_a_released_segment():
    arena = Arena(1000 * PAGE_COST)
    item = stored(50, 8)
    arena.insert(item)
    arena.remove(item)
    places = len(arena.space.segments)
    assert arena.set_limit(PAGE_COST)
    assert arena.set_limit(1000 * PAGE_COST)
    assert arena.insert(stored(50, 8))
    assert len(arena.space.segments) == places
    arena.check()


def test_segments_are_where_the_arena_is_told():
    arena = Arena(math.inf, torch.device("cpu"))
    arena.insert(stored())
    assert all(s.device == arena.device for s in arena.space.segments)


def test_a_plane_that_cannot_be_read_keeps_its_turn(monkeypatch):
    """No memory to copy it into before it is spilled: it is demoted another time."""
    arena = Arena(math.inf)
    arena.spill = lambda pages: None
    kept = [stored(pages=4) for _ in range(3)]
    assert all(arena.insert(each) for each in kept)

    def fails(table):
        raise RuntimeError("can't allocate memory")

    held = arena.held_bytes
    with monkeypatch.context() as patch:
        patch.setattr(arena._segments, "read", fails)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="allocate"):
                arena.set_limit(held / 2)
    arena.check()
    assert arena.set_limit(held / 2)
    arena.check()
