"""Terms: the largest batch under the least budget, and what is due anywhere."""

from __future__ import annotations

import math

import pytest
from several import on_threads

from daf_hf.agreement import Terms
from daf_hf.distributed import ALONE
from daf_hf.sites import Batch


def agreed(*terms):
    """What all ranks go by; it is the same on each."""
    found = on_threads(*(each.agreed for each in terms))
    assert all(each == found[0] for each in found)
    return found[0]


def test_alone_everybody_keeps_to_his_own():
    terms = Terms(Batch(4, 7, 20), 1e6, due=True, wanted_bytes=3)
    assert terms.agreed(ALONE) is terms


def test_the_largest_batch_under_the_least_budget():
    terms = agreed(Terms(Batch(4, 20), 2e6), Terms(Batch(8, 10), math.inf))
    assert terms == Terms(Batch(8, 20), 2e6)


def test_padding_counts_where_one_rank_has_it():
    assert agreed(Terms(Batch(4, 8), 1e6), Terms(Batch(4, 8), 1e6)).batch.unpadded is None
    assert agreed(Terms(Batch(4, 8, 9), 1e6), Terms(Batch(4, 8, 20), 1e6)).batch.unpadded == 20
    assert agreed(Terms(Batch(4, 8, 9), 1e6), Terms(Batch(4, 8), 1e6)).batch.unpadded == 32


@pytest.mark.parametrize("name", ["due", "recalls", "undecided"])
def test_what_is_due_on_one_rank_is_due_on_all(name):
    batch = Batch(1)
    terms = agreed(Terms(batch, 1e6), Terms(batch, 1e6, **{name: True}), Terms(batch, 1e6))
    assert terms == Terms(batch, 1e6, **{name: True})


def test_nothing_is_learnt_of_a_pass_that_one_rank_did_not_see_whole():
    one, other = Terms(Batch(1), 1e6, wanted_bytes=5), Terms(Batch(1), 1e6, wanted_bytes=9)
    assert agreed(one, other).wanted_bytes == 9
    assert agreed(one, Terms(Batch(1), 1e6)).wanted_bytes is None
