"""What ranks have measured, made one."""

from __future__ import annotations

import pytest
import torch
from several import on_threads

from daf_hf.codecs import GELU, Codec
from daf_hf.distributed import ALONE
from daf_hf.fitting import fitted
from daf_hf.kernels.format import Granularity
from daf_hf.pooling import Outcome, pool
from daf_hf.sites import Batch, Live, Probed, SaveSite, SiteTracker

UNIFORM = Codec(Granularity.GROUP, "uniform")
NORMAL = Codec(Granularity.TOKEN, "normal")


def tracker_of(**sites):
    """A tracker that has met these sites of one module, in this order."""
    tracker = SiteTracker(torch.nn.Linear(1, 1))
    for ordinal, (name, values) in enumerate(sites.items()):
        probed = Probed(Batch(ordinal + 1), (1,), (0,), 1, (0,), 1, 1.0, 1.0)
        site = SaveSite(f"layer/{ordinal}", "layer", probed=probed, known=True)
        for field, value in values.items():
            setattr(site, field, value)
        tracker.sites["layer", True, (name,), 0] = site
        tracker.ordinals["layer"] = ordinal + 1
    return tracker


def pooled(*trackers, outcomes=None):
    """Pool them; what came of it on each rank."""
    outcomes = outcomes or [Outcome()] * len(trackers)
    works = [
        lambda ranks, tracker=tracker, outcome=outcome: pool(ranks, tracker, lambda: outcome)
        for tracker, outcome in zip(trackers, outcomes, strict=True)
    ]
    return on_threads(*works)


def by_kind(tracker):
    return {key[2][0]: site for key, site in tracker.sites.items()}


def test_alone_nothing_changes():
    tracker = tracker_of(a={"importance": 1.0})
    outcome = Outcome(seconds=2.0)
    assert pool(ALONE, tracker, lambda: outcome) is outcome
    assert by_kind(tracker)["a"].importance == 1.0


def test_figures_are_averaged_over_the_ranks_that_have_them():
    one = tracker_of(a={"importance": 1.0, "error_at_zero": None}, b={"importance": None})
    other = tracker_of(a={"importance": 4.0, "error_at_zero": 0.5}, b={"importance": None})
    pooled(one, other)
    for tracker in (one, other):
        sites = by_kind(tracker)
        assert sites["a"].importance == 2.5 and sites["a"].error_at_zero == 0.5
        assert sites["b"].importance is None


def test_sites_are_in_one_order_with_one_name_wherever_they_were_met():
    one, other = tracker_of(a={}, c={}), tracker_of(mask={}, a={}, b={}, c={})
    own = by_kind(other)
    pooled(one, other)
    names = [(key[2][0], site.name) for key, site in one.sites.items()]
    assert names == [("a", "layer/0"), ("c", "layer/1"), ("mask", "layer/2"), ("b", "layer/3")]
    assert names == [(key[2][0], site.name) for key, site in other.sites.items()]
    assert by_kind(other) == own  # the same objects: a forward pass may be under way
    assert one.ordinals == {"layer": 4}


def test_what_is_said_of_a_site_holds_on_all_ranks():
    one = tracker_of(
        noise={"two_valued": True, "keep": 0.9},
        rows={"live": Live.UNPADDED},
        derived={"derived": True},
        read={"consumers": {"A.x"}},
        first={"live": Live.FIRST},
    )
    other = tracker_of(
        noise={"two_valued": True, "keep": 0.8},
        rows={"live": Live.UNPADDED, "watched": Live.UNPADDED},
        derived={"derived": False, "feeds": True},
        read={"consumers": {"B.y"}},
        first={"live": Live.UNPADDED, "alive": {Live.FIRST}},
    )
    pooled(one, other)
    for sites in map(by_kind, (one, other)):
        assert sites["noise"].two_valued and sites["noise"].keep is None
        assert (sites["rows"].live, sites["rows"].watched) == (Live.ALL, Live.UNPADDED)
        assert not sites["derived"].derived and sites["derived"].feeds
        assert sites["read"].consumers == {"A.x", "B.y"}
        assert sites["first"].live is Live.ALL and sites["first"].alive == {Live.FIRST}


def test_codecs_are_those_that_most_ranks_have_measured():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    made = fitted(NORMAL, values, values.mean(), values.std())
    ramp = tuple(float(8 - bits) for bits in range(9))
    twice = tuple(2 * error for error in ramp)
    one = tracker_of(a={"distortions": {UNIFORM: ramp, NORMAL: ramp}}, b={})
    other = tracker_of(a={"distortions": {UNIFORM: twice}}, b={"distortions": {made: ramp}})
    pooled(one, other)
    for sites in map(by_kind, (one, other)):
        assert sites["a"].distortions == {UNIFORM: tuple(1.5 * error for error in ramp)}
        (codec,) = sites["b"].distortions
        assert torch.equal(codec.book.tables[3], made.book.tables[3])


def test_a_codec_for_one_reader_goes_where_another_rank_saw_more_readers():
    ramp = (1.0,) * 9
    readers = {"GeluBackward0.self"}
    sites = {"consumers": readers, "distortions": {GELU: ramp, UNIFORM: ramp}}
    one, other = tracker_of(a=dict(sites)), tracker_of(a={**sites, "consumers": {"Mul.other"}})
    pooled(one, other)
    assert list(by_kind(one)["a"].distortions) == list(by_kind(other)["a"].distortions) == [UNIFORM]


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (
            [Outcome(seconds=1, least_bytes=5), Outcome(seconds=3, least_bytes=2)],
            Outcome(seconds=3, least_bytes=5),
        ),
        ([Outcome(failure="no room", seconds=1), Outcome(least_bytes=2)], Outcome("", True, 1, 2)),
        ([Outcome(failure="no room"), Outcome(trains=False)], Outcome("no room")),
        ([Outcome(trains=False), Outcome(trains=False)], Outcome(trains=False)),
        ([Outcome(token_seconds=1.0), Outcome(token_seconds=3.0)], Outcome(token_seconds=2.0)),
    ],
)
def test_one_rank_that_measured_is_enough(outcomes, expected):
    assert pooled(tracker_of(), tracker_of(), outcomes=outcomes) == [expected] * 2
