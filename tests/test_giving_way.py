"""Exact tensors that give way when the budget falls, or when others need the room."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tiny import MODELS, Watch, batch, build, compressed, loss_of, nothing_held

from daf_hf import DAFConfig
from daf_hf.arena import PAGE_COST
from daf_hf.codecs import GENERAL
from daf_hf.giving_way import GivingWay, Way
from daf_hf.leases import Lease
from daf_hf.physical import Yielding
from daf_hf.saved_tensors import Compressor
from daf_hf.sites import SaveSite
from daf_hf.stored import Stored

MB = 1e6
LOOSE = 50
MODEL = torch.nn.Linear(8, 8)


def gradients(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def forward(model, daf, inputs):
    torch.manual_seed(0)
    with daf:
        return loss_of(model(**inputs))


def step(model, daf, inputs, fall=None):
    loss = forward(model, daf, inputs)
    if fall is not None:
        daf.set_budget(fall)
    loss.backward()
    daf.step()
    return gradients(model)


def distance(one, other):
    error = sum((one[name] - other[name]).pow(2).sum() for name in other)
    return math.sqrt(error / sum(grad.pow(2).sum() for grad in other.values()))


@pytest.mark.parametrize("name", MODELS)
def test_a_fall_from_a_loose_plan_is_followed_at_once(name):
    model, inputs = build(name), batch(name)
    daf, compressor = compressed(model, LOOSE)
    plain = step(model, daf, inputs)
    watch = Watch(compressor)
    loss = forward(model, daf, inputs)
    loose = watch.held()
    daf.set_budget(loose / 2 / MB)
    assert watch.held() == compressor.arena.held_bytes <= loose / 2
    assert watch.footprint() <= loose / 2
    compressor.arena.check()
    loss.backward()
    assert distance(gradients(model), plain) < 0.1
    assert nothing_held(compressor)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_what_the_plan_at_the_least_would_hold(name):
    model, inputs = build(name), batch(name)
    daf, compressor = compressed(model, LOOSE)
    step(model, daf, inputs)
    step(model, daf, inputs)
    loss = forward(model, daf, inputs)
    least = daf._session.planner.least_bytes
    daf.set_budget(least / MB)
    assert compressor.arena.held_bytes <= 1.05 * least  # codecs are not those of that plan
    loss.backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())


def test_what_must_be_exact_stays(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, LOOSE, exclude=("*",))
    plain = step(bert_model, daf, bert_batch)
    got = step(bert_model, daf, bert_batch, fall=0.05)
    assert all(torch.equal(got[name], plain[name]) for name in plain)
    assert not compressor.arena.demotions


def test_what_is_spilled_loses_nothing(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, LOOSE, on_overflow="spill")
    plain = step(bert_model, daf, bert_batch)
    loss = forward(bert_model, daf, bert_batch)
    before = compressor.held_bytes()
    daf.set_budget(before / 2 / MB)
    assert compressor.held_bytes() <= before / 2
    assert compressor.ledger.counts["spilled"]
    loss.backward()
    got = gradients(bert_model)
    assert all(torch.equal(got[name], plain[name]) for name in plain)


# One tensor --------------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        ctx.met.append(x)
        return 2 * x * grads[0]


def saving(daf, x, met):
    """Save ``x``; what is restored comes to ``met``."""
    with daf.scope():
        y = Square.apply(x)
    y.grad_fn.met = met
    return y.sum()


def exact(budget_bytes, **options):
    """A compressor that keeps what it saves exactly as long as there is room."""
    daf = Compressor(MODEL, DAFConfig(budget_mb=budget_bytes / MB, **options))
    daf.placement._may_quantize = lambda flat, site: False  # as under a plan that has room
    return daf


def test_others_need_the_room():
    daf = exact(600e3)
    saved = [torch.randn(65536, requires_grad=True) for _ in range(3)]
    met: list[torch.Tensor] = []
    first, second = (saving(daf, x, met) for x in saved[:2])
    assert daf.arena.held_bytes == 2 * saved[0].nbytes
    third = saving(daf, saved[2], met)
    assert 2 * saved[0].nbytes < daf.arena.held_bytes <= 600e3
    for y in (first, second, third):
        y.backward()
    assert sum(torch.equal(one, x) for one, x in zip(met, saved, strict=True)) == 2
    assert all(torch.allclose(one, x, atol=0.5) for one, x in zip(met, saved, strict=True))
    assert nothing_held(daf)


def test_what_two_dtypes_hold_frees_nothing_alone():
    daf = exact(1e6)
    x = torch.randn(65536)
    with daf.scope():
        handles = [daf._pack(x), daf._pack(x.view(torch.bfloat16))]
    held = daf.arena.held_bytes
    assert held == x.nbytes
    assert not daf.set_limit(held / 2)
    assert daf.arena.held_bytes == held
    assert torch.equal(daf._unpack(handles[0]), x)


def test_what_others_have_held_too():
    daf = exact(1e6)
    x = torch.randn(65536)
    with daf.scope():
        kept, ended = daf._pack(x), daf._pack(x.view(torch.bfloat16))
    assert not daf.set_limit(x.nbytes / 2)
    del ended
    assert daf.set_limit(x.nbytes / 2)
    assert torch.allclose(daf._unpack(kept), x, atol=0.5)


@pytest.mark.parametrize("options", [{}, {"on_overflow": "spill"}])
def test_what_fails_to_give_way_does_so_another_time(options, monkeypatch):
    daf = exact(1e6, **options)
    x = torch.randn(65536)
    with daf.scope():
        handle = daf._pack(x)

    def fails(*args):
        raise MemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr(daf.placement._pages, "encode", fails)
        patched.setattr(daf.placement._spill, "write", fails)
        with pytest.raises(MemoryError, match="none left"):
            daf.set_limit(1e5)
    assert daf.arena.held_bytes == x.nbytes
    daf.arena.check()
    assert "spilled" not in daf.ledger.counts
    assert daf.set_limit(1e5)
    assert torch.allclose(daf._unpack(handle), x, atol=0.5)
    del handle
    assert nothing_held(daf)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_fall_in_the_middle_costs_no_more_than_one_at_the_end(name, layer):
    """What was to be exact and finds no room is lowered itself, not all else to its least."""
    model, inputs = build(name), batch(name)
    daf, compressor = compressed(model, LOOSE)
    plain = step(model, daf, inputs)
    step(model, daf, inputs)
    low = compressor.ledger.peak.held * 0.2 / MB
    at_the_end = distance(step(model, daf, inputs, fall=low), plain)
    daf.set_budget(LOOSE)
    middle = [m for m in model.modules() if type(m).__name__.endswith("Attention")][layer]
    with middle.register_forward_hook(lambda *_: daf.set_budget(low)):
        in_the_middle = distance(step(model, daf, inputs), plain)
    assert 0 < in_the_middle < 3 * at_the_end


def test_a_plan_learns_from_what_gave_way():
    daf = exact(600e3)
    saved = [torch.randn(65536, requires_grad=True) for _ in range(3)]
    with daf.scope():
        handles = [daf._pack(x) for x in saved]
    assert daf.arena.held_bytes + daf.placement.room.lost_bytes == 3 * saved[0].nbytes
    del handles


def test_what_cannot_be_encoded_stays():
    daf = exact(1e6)
    x = torch.full((65536,), math.nan)
    with daf.scope():
        handle = daf._pack(x)
    assert not daf.set_limit(1e5)
    assert daf._unpack(handle).isnan().all()


def test_a_reader_in_another_thread_gets_one_or_the_other():
    x = torch.randn(8)

    class Moves(Yielding):
        """Moved just after it was seen to be where it was."""

        @property
        def place(self):
            at = self.at
            if at is None:
                self.move_to(there)
            return at

        @place.setter
        def place(self, at):
            self.at = at

    class There:
        def flat(self):
            return x + 1

        own = flat

    there = There()
    for read in (Moves.flat, Moves.own, lambda held: next(iter(held.parts()))[1]):
        held = Moves(SaveSite("s", "m"), x, 1, Lease(lambda _: None, None), None)
        assert torch.equal(read(held), x + 1)


class Masked(torch.nn.Module):
    """Saves what its input's mask makes of small values: some of -1e30."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))
        self.head = torch.nn.Linear(64, 2)

    def forward(self, x, mask, labels):
        for layer in self.layers:
            x = x + F.silu(layer(x).masked_fill(mask[:, :, None], -1e30))
        return {"loss": F.cross_entropy(self.head(x.mean(1)), labels)}


@pytest.mark.parametrize("packing", ["device", "host"])
@pytest.mark.parametrize("budget", [1.2, 0.4])
def test_values_that_calibration_did_not_see_and_no_codec_can_hold(budget, packing):
    torch.manual_seed(0)
    model = Masked()
    inputs = {"x": torch.randn(16, 32, 64), "labels": torch.randint(0, 2, (16,))}
    none = torch.zeros(16, 32, dtype=torch.bool)
    padded = none.clone()
    padded[:, 20:] = True
    daf, compressor = compressed(model, budget, packing=packing)
    step(model, daf, {**inputs, "mask": none})
    step(model, daf, {**inputs, "mask": none})
    got = step(model, daf, {**inputs, "mask": padded})
    loss = model(**inputs, mask=padded)["loss"]
    loss.backward()
    assert distance(got, gradients(model)) < 0.3
    assert compressor.ledger.peak.held <= budget * MB
    assert nothing_held(compressor)


def test_witnesses_make_room_for_a_fall(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, LOOSE)
    step(bert_model, daf, bert_batch)
    loss = forward(bert_model, daf, bert_batch)
    assert compressor.placement.room._witnessed
    daf.set_budget(1e-6)
    assert not compressor.placement.room._witnessed
    loss.backward()


# Order -------------------------------------------------------------------------------------------


def way_of(cost, freed=100 * PAGE_COST):
    layout = GENERAL.layout(32768, 1, 2)
    return Way(Stored(layout, 2, (2,), (1.0, 1.0, cost)), GENERAL, freed)


def held_at(name):
    return Yielding(SaveSite(name, "m"), torch.zeros(8), 1, Lease(lambda _: None, None), None)


class Order(GivingWay):
    """Ways by the names of sites."""

    def __init__(self, ways):
        super().__init__(MODEL)
        self.ways, self.shared = ways, set()

    def way(self, flat, cols, site, freed):
        return self.ways.get(site.name)

    def _freed(self, held):
        return 0 if held.site.name in self.shared else 1


def test_the_least_cost_a_page_goes_first():
    ways = {"dear": way_of(0.5), "cheap": way_of(0.1), "small": way_of(0.1, 20 * PAGE_COST)}
    order = Order(ways)
    kept = [held_at(name) for name in ("small", "dear", "cheap", "none")]
    for held in kept:
        order.add(held)
    assert order.cheapest() == ways["cheap"].score < ways["dear"].score < ways["small"].score
    found = [order.pop() for _ in range(4)]
    assert [pair[0].site.name if pair else None for pair in found] == [
        "cheap", "dear", "small", None,
    ]  # fmt: skip


def test_what_has_ended_gives_nothing():
    order = Order(dict.fromkeys("abc", way_of(0.1)))
    first, second, third = held_at("a"), held_at("b"), held_at("c")
    order.add(first)
    order.add(second)
    assert order.cheapest() < math.inf
    order.add(third)
    del first, third
    order.clear()
    assert len(order._order) == 1 and not order._unranked
    found = order.pop()
    assert found is not None and found[0] is second
    assert order.pop() is None and order.cheapest() == math.inf


def test_what_others_hold_too_gives_way_once_they_have_ended():
    order = Order({"a": way_of(0.1), "b": way_of(0.2)})
    first, second = held_at("a"), held_at("b")
    order.add(first)
    order.add(second)
    order.shared = {"a"}
    assert order.cheapest() == way_of(0.2).score
    order.shared = {"b"}  # it was ranked already
    found = order.pop()
    assert found is not None and found[0] is first
    assert order.pop() is None
    order.shared = set()
    found = order.pop()
    assert found is not None and found[0] is second


def test_what_makes_no_room_has_no_price():
    assert way_of(0.1, 0).score == math.inf
    assert way_of(0.1, 3 * PAGE_COST).score == math.inf


def test_what_is_doubted_gives_way_too():
    """A normalisation's output whose node is no longer that of calibration."""
    model, inputs = build("roberta", dropout=0.0), batch("roberta")
    daf, compressor = compressed(model, LOOSE)
    plain = step(model, daf, inputs)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    hooks = [m.register_full_backward_hook(lambda *_: None) for m in norms]
    loss = forward(model, daf, inputs)
    assert compressor.ledger.counts["doubted"] > 0
    held = compressor.arena.held_bytes
    daf.set_budget(0.25 * held / MB)
    assert compressor.arena.held_bytes <= 0.25 * held
    loss.backward()
    assert distance(gradients(model), plain) < 0.1
    for hook in hooks:
        hook.remove()
