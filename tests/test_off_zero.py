"""Parameters that are all zero: moved for a measurement, and put back."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import batch, build, compressed, gradients
from torch import nn

from daf_hf.off_zero import NUDGE, all_zero, moved, signed_steps


def test_only_what_is_zero_everywhere_is_moved():
    zero = nn.Parameter(torch.zeros(3))
    some = nn.Parameter(torch.tensor([0.0, 1.0]))
    assert all_zero([some, zero, nn.Parameter(torch.zeros(2, device="meta"))]) == [zero]


def test_a_step_follows_the_gradients_sign():
    one, unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    moves, complete = signed_steps([one, unused], [torch.tensor([2.0, 0.0, -1e-9]), None])
    assert complete
    assert list(moves) == [one]
    assert torch.equal(moves[one], torch.tensor([-NUDGE, 0.0, NUDGE]))


@pytest.mark.parametrize("gradient", [0.0, math.nan, math.inf])
def test_without_a_direction_there_is_no_step(gradient):
    assert signed_steps([nn.Parameter(torch.zeros(1))], [torch.tensor([gradient])]) == ({}, False)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt("here")], ids=repr)
def test_moved_parameters_are_put_back_unnoticed(error):
    """A graph that was built before runs backward afterwards."""
    parameter = nn.Parameter(torch.tensor([-0.0, 0.0]))
    loss, version = parameter.square().sum(), parameter._version
    try:
        with moved({parameter: torch.tensor([1.0, 2.0])}):
            assert parameter.tolist() == [1.0, 2.0]
            if error is not None:
                raise error
    except KeyboardInterrupt as caught:
        assert caught is error
    assert parameter.detach().signbit().tolist() == [True, False]
    assert parameter._version == version
    loss.backward()


def test_inputs_of_zero_adapters_are_not_free():
    """While LoRA's B is zero, its A has no gradient: measured as it stands, A's input is free."""
    model, inputs = build("bert"), batch("bert")
    daf, compressor = compressed(model, 0.5)
    gradients(model, inputs, daf)
    inputs_of_a = [
        site
        for site in compressor.tracker.sites.values()
        if "lora_dropout" not in site.module and ".lora_A" in site.module and site.candidates
    ]
    assert inputs_of_a
    assert all(site.importance > 0 for site in inputs_of_a)
