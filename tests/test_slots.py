"""What hooks packed for a node: as torch tells it, and as earlier ones have to be asked."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from tiny import batch, build, compressed, gradients, same
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from daf_hf import slots
from daf_hf.slots import note_packed, note_scope, packed_in, slots_of, telling

WAYS = [False, *([True] if slots.READABLE else [])]


@pytest.fixture(params=WAYS, ids=["asked", "read"])
def readable(request, monkeypatch):
    monkeypatch.setattr(slots, "READABLE", request.param)
    return request.param


class Packed:
    """What these tests' hooks keep."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()


@contextmanager
def packing(unpacked=None):
    """Our hooks; what they unpack is appended to ``unpacked``."""

    def pack(tensor):
        note_packed()
        return Packed(tensor)

    def unpack(packed):
        if unpacked is not None:
            unpacked.append(packed)
        return packed.tensor

    with saved_tensors_hooks(pack, telling(unpack)):
        note_scope()
        yield


class Twofold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, 2 * x)
        return 2 * x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 * ctx.saved_tensors[1]


def shapes(node):
    return {
        slot: [tuple(each.tensor.shape) for each in packed_in(node, slot)]
        for slot in slots_of(node)
    }


def test_slots_by_name(readable):
    unpacked: list[Packed] = []
    x, y = torch.randn(3, 1, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    with packing(unpacked):
        product = x * y
        normal = torch.nn.functional.layer_norm(product, (4,))
        twice = Twofold.apply(normal)
    assert shapes(product.grad_fn) == {"self": [(3, 1)], "other": [(3, 4)]}
    found = shapes(normal.grad_fn)
    assert found["input"] == [(3, 4)] and found["result1"] == [(3, 1)]
    assert found["weight"] == found["bias"] == []
    assert shapes(twice.grad_fn) == {"tensors": [(3, 4), (3, 4)]}
    assert not unpacked
    twice.sum().backward()  # nothing of it was spoilt
    reference = torch.autograd.grad(
        2 * torch.nn.functional.layer_norm(x * y, (4,)).square().sum(), (x, y)
    )
    assert torch.allclose(x.grad, reference[0], atol=1e-5)  # type: ignore[arg-type]
    assert torch.allclose(y.grad, reference[1], atol=1e-5)  # type: ignore[arg-type]
    assert shapes(product.grad_fn) == {"self": [], "other": []}  # freed


def test_numbers_pass_by_all_hooks(readable):
    x = torch.randn(3, 4, requires_grad=True)
    with packing():
        product = x.exp() * 3.0
    for _ in range(2):
        assert [float(number) for number in packed_in(product.grad_fn, "other")] == [3.0]
    assert packed_in(product.grad_fn, "self") == []
    product.sum().backward()
    assert torch.equal(x.grad, 3 * x.detach().exp())  # type: ignore[arg-type]


def test_others_are_not_asked_to_unpack(readable):
    """A checkpoint would run its region again."""
    runs = []

    def region(x):
        runs.append(1)
        return (x * torch.arange(4.0)).exp()

    x = torch.randn(3, 4, requires_grad=True)
    with packing():
        y = checkpoint(region, x.tanh(), use_reentrant=False)
    for node in (y.grad_fn, y.grad_fn.next_functions[0][0]):
        for slot in slots_of(node):
            assert not [p for p in packed_in(node, slot) if isinstance(p, Packed)]
    assert len(runs) == 1
    y.sum().backward()
    assert len(runs) == 2


def test_graphs_without_our_hooks_are_left_alone(readable):
    x = torch.randn(3, 4, requires_grad=True)
    before = x * torch.ones(3, 4)
    with packing():
        pass
    if not readable:
        assert packed_in(before.grad_fn, "other") == []
    assert packed_in(torch.ones(1, requires_grad=True).expand(2).grad_fn, "self") == []


def test_many_notes_are_not_kept(readable, monkeypatch):
    monkeypatch.setattr(slots, "_NOTES_KEPT", 8)
    x = torch.randn(3, requires_grad=True)
    with packing():
        for _ in range(40):
            y = x.exp()
    assert len(packed_in(y.grad_fn, "result")) == 1
    if not readable:
        assert len(slots._NOTES.numbers) <= 8 and len(slots._NOTES.earlier) <= 8


@pytest.mark.skipif(not slots.READABLE, reason="this torch is one that has to be asked")
@pytest.mark.parametrize("name", ["roberta", "gpt2", "llama", "t5"])
def test_calibrations_find_the_same_either_way(name, monkeypatch):
    found = []
    for way in (True, False):
        monkeypatch.setattr(slots, "READABLE", way)
        torch.manual_seed(0)
        model, inputs = build(name), batch(name)
        daf, compressor = compressed(model, 0.4)
        gradient = gradients(model, inputs, daf, seed=1)
        sites = compressor.tracker.sites.values()
        known = [(s.name, s.consumer, s.importance, s.derived, s.normalised) for s in sites]
        found.append((known, gradient))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])
