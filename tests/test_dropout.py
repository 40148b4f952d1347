"""Dropout's noise is drawn again: when it is recognised, and when it is not."""

from __future__ import annotations

import pytest
import torch
from test_noise import FLOATS
from tiny import Watch, batch, build, compressed, gradients, nothing_held, relative_error, same
from torch import nn
from torch.nn.functional import dropout

from daf_hf.dropout import SMALLEST_ELEMENTS, Draws
from daf_hf.kernels import get_backend
from daf_hf.kernels.noise import STATE_BYTES, TorchStream, streams

LARGE = (256, 256)
BACKENDS = ["auto", "reference"]


def drawn(p, dtype=torch.float32, shape=LARGE):
    """What ``dropout`` multiplies by, as it is saved."""
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dropout(torch.ones(shape, dtype=dtype, requires_grad=True), p)
    return saved[0].detach().flatten()


@pytest.fixture(params=BACKENDS)
def draws(request):
    return Draws(streams(get_backend(request.param)))


# Recognising ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.05, 0.9, 0.123, 0.1 + 0.2])
def test_noise_is_recognised_and_drawn_again(draws, p, dtype):
    torch.manual_seed(0)
    torch.rand(3)
    draws.note()
    flat = drawn(p, dtype)
    keep = draws.learn(flat)
    assert keep == pytest.approx(1 - p)
    noise = draws.recognise(flat, keep)
    again = torch.empty_like(flat)
    noise.begin().fill(again)
    assert torch.equal(again, flat)


def test_what_was_drawn_after_something_else_is_not(draws):
    draws.note()
    flat = drawn(0.1)
    keep = draws.learn(flat)
    later = drawn(0.1)
    assert draws.learn(later) is None
    assert draws.recognise(later, keep) is None
    draws.note()
    torch.rand(1)
    assert draws.recognise(drawn(0.1), keep) is None


@pytest.mark.parametrize(
    "change",
    [lambda flat: flat * 2, lambda flat: flat[1:], lambda flat: flat.double(), torch.ones_like],
)
def test_what_is_like_noise_is_not(draws, change):
    draws.note()
    flat = drawn(0.1)
    keep = draws.learn(flat)
    assert draws.recognise(change(flat), keep) is None
    assert draws.learn(change(flat)) is None


@pytest.mark.parametrize("values", [[0.0, 1.0], [0.0, float("inf")], [0.0, float("nan")], [-1, -2]])
def test_two_values_that_are_no_noise(draws, values):
    draws.note()
    assert draws.learn(torch.tensor(values).repeat(SMALLEST_ELEMENTS)) is None
    assert draws.learn(torch.empty(0)) is None


@pytest.mark.parametrize("p", [0.1, 0.01, 0.001])
def test_a_change_of_one_element_is_noticed_in_calibration(draws, p):
    draws.note()
    flat = drawn(p)
    flat[-1] = 1 / (1 - p) if flat[-1] == 0 else 0.0
    assert draws.learn(flat) is None


@pytest.mark.parametrize("p", [0.1, 0.01, 0.001])
def test_other_noise_is_never_taken_for_it(draws, p):
    for _ in range(20):
        draws.note()
        torch.rand(1)
        assert draws.recognise(drawn(p), 1 - p) is None


def test_a_bit_an_element_may_be_less_than_the_state(draws):
    draws.note()
    flat = drawn(0.1)[: SMALLEST_ELEMENTS - 1]
    assert draws.recognise(flat, 0.9) is None


def test_without_a_note_nothing_is_known(draws):
    flat = drawn(0.1)
    assert draws.learn(flat) is None
    assert draws.recognise(flat, 0.9) is None


def test_noting_draws_nothing(draws):
    before = torch.get_rng_state()
    draws.note()
    draws.learn(torch.tensor([0.0, 1 / 0.9]).repeat(SMALLEST_ELEMENTS))
    draws.recognise(torch.ones(SMALLEST_ELEMENTS), 0.9)
    assert torch.equal(torch.get_rng_state(), before)


# In training ------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Draws noise in modules, in functions, and behind whatever ``between`` does."""

    def __init__(self, p=0.1, between=lambda: None):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.dropout, self.p, self.between = nn.Dropout(p), p, between

    def forward(self, x):
        x = self.dropout(self.first(x)).tanh()
        self.between()
        return dropout(dropout(self.second(x), self.p).tanh(), self.p).square().mean()


def train(model, x, budget_mb=1e3, **options):
    """Gradients of a second step under compression, those of plain training, and the sites."""

    def step(seed):
        model.zero_grad()
        torch.manual_seed(seed)
        model(x).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    exact = step(2)
    after = torch.get_rng_state()
    daf, compressor = compressed(model, budget_mb, **options)
    with daf:
        step(1)
        daf.step()
        measured = step(2)
        assert torch.equal(torch.get_rng_state(), after)
        sites = [site for site in compressor.tracker.sites.values() if site.two_valued]
    assert nothing_held(compressor)
    return measured, exact, sites


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_plain_trainings_bit_for_bit(backend):
    measured, exact, sites = train(Masked(), torch.randn(1024, 64), backend=backend)
    assert [site.placed for site in sites] == [("drawn", None)] * 3
    assert same(measured, exact)


class Unseen(Masked):
    """Draws noise behind whatever ``between`` does, with no call and no save in between."""

    def forward(self, x):
        y = dropout(self.first(x).tanh(), self.p)
        self.between()
        return dropout(y.tanh(), self.p).square().mean()


@pytest.mark.parametrize(
    "kind, ways", [(Masked, ["drawn", "drawn", "drawn"]), (Unseen, ["drawn", "binary"])]
)
def test_what_others_draw_in_between_is_no_harm(kind, ways):
    model = kind(between=lambda: torch.rand(5))
    measured, exact, sites = train(model, torch.randn(1024, 64))
    assert [str(site.placed[0]) for site in sites] == ways
    assert same(measured, exact)


def test_draws_in_between_from_the_second_step_on():
    calls = []

    def now_and_then():
        calls.append(1)
        if len(calls) % 7 == 0:
            torch.rand(5)

    model, x = Unseen(between=now_and_then), torch.randn(1024, 64)
    daf, compressor = compressed(model, 1e3)
    ways = set()
    with daf:
        for _ in range(12):
            model(x).backward()
            daf.step()
            ways |= {str(s.placed[0]) for s in compressor.tracker.sites.values() if s.two_valued}
    assert ways == {"drawn", "binary"}
    assert nothing_held(compressor)


def test_a_rate_that_changes():
    model, x = Masked(), torch.randn(1024, 64)

    def step(p):
        model.p = model.dropout.p = p
        model.zero_grad()
        torch.manual_seed(1)
        model(x).backward()
        return {n: q.grad.clone() for n, q in model.named_parameters()}

    rates = (0.1, 0.2, 0.1)
    exact = [step(p) for p in rates]
    daf, compressor = compressed(model, 1e3)
    ways = []
    with daf:
        for p, expected in zip(rates, exact, strict=True):
            assert same(step(p), expected)
            ways.append({str(s.placed[0]) for s in compressor.tracker.sites.values() if s.keep})
            daf.step()
    assert ways == [{"drawn"}, {"binary"}, {"drawn"}]


def test_the_state_is_counted():
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(1024, 64)
    daf, compressor = compressed(model, 1e3)
    watch = Watch(compressor)
    with daf:
        model(x).backward()
        loss = model(x)
        assert watch.held() == compressor.held_bytes()
        states = [p for p in watch._physicals if hasattr(p, "noise")]
        assert len(states) == 3
        assert all(p.noise.state.untyped_storage().nbytes() == STATE_BYTES for p in states)
        del states
        loss.backward()
        del loss
    assert nothing_held(compressor)


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "t5"])
def test_models_hold_no_masks(name):
    model, inputs = build(name), batch(name, examples=32, tokens=32)
    exact = gradients(model, inputs)
    daf, compressor = compressed(model, 100.0)
    gradients(model, inputs, daf, seed=6)
    measured = gradients(model, inputs, daf)
    masks = [
        site
        for site in compressor.tracker.sites.values()
        if site.two_valued and site.nbytes > 4 * SMALLEST_ELEMENTS
    ]
    assert masks
    assert {site.placed[0] for site in masks} == {"drawn"}
    assert relative_error(measured, exact) < 1e-3
    assert nothing_held(compressor)


def test_a_graph_that_is_run_twice():
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(1024, 64)
    daf, _ = compressed(model, 1e3)
    with daf:
        model(x).backward()
        loss = model(x)
    model.zero_grad()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), first, strict=True))


def test_streams_of_torch_are_drawn_whole():
    """Where parts are not what is drawn at once, nobody asks for them."""
    assert not TorchStream.divisible
    measured, exact, _ = train(Masked(), torch.randn(2048, 64), 0.3, backend="reference")
    assert relative_error(measured, exact) < 0.5
