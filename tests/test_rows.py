"""Rows that no gradient reaches: which they are, that gradients stay exact, and what is noticed."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import batch, build, gradients
from torch import nn

from daf_hf import compress_activations
from daf_hf.rows import LiveRows, Rows, spread, take
from daf_hf.sites import DIM_BATCH, DIM_BOTH, DIM_CONSTANT, DIM_TOKENS, Batch, Live

EXAMPLES, TOKENS = 3, 20


def inputs(lengths, tokens=TOKENS):
    mask = torch.arange(tokens) < torch.tensor(lengths)[:, None]
    ids = torch.zeros(len(lengths), tokens, dtype=torch.long)
    return (), {"input_ids": ids, "attention_mask": mask.long()}


def padded(name="bert", examples=8, tokens=24):
    found = batch(name, examples=examples, tokens=tokens)
    lengths = torch.linspace(tokens // 3, tokens, examples).long()
    mask = torch.arange(tokens) < lengths[:, None]
    return {**found, "attention_mask": mask.long()}


def compressed(model, **options):
    options = (
        {"budget_mb": 50, "importance": "error", "calibration_batch": 8}
        | {"skip_padding": True}
        | options
    )
    return compress_activations(model, calibrate_at=[0], **options)


def sites(daf, live):
    found = daf._session.compressor.tracker.sites.values()
    return {site.name for site in found if site.live is live}


# --- which rows ---------------------------------------------------------------------------------

SHAPES = {
    "tokens of examples": ((EXAMPLES, TOKENS, 32), (DIM_BATCH, DIM_TOKENS, DIM_CONSTANT)),
    "flattened": ((EXAMPLES * TOKENS, 32), (DIM_BOTH, DIM_CONSTANT)),
    "heads": ((EXAMPLES, 2, TOKENS, 16), (DIM_BATCH, DIM_CONSTANT, DIM_TOKENS, DIM_CONSTANT)),
    "heads in the batch": ((EXAMPLES * 2, TOKENS, 16), (DIM_BATCH, DIM_TOKENS, DIM_CONSTANT)),
    "weights": ((EXAMPLES * 2, TOKENS, TOKENS), (DIM_BATCH, DIM_TOKENS, DIM_TOKENS)),
    "tokens first": ((TOKENS, EXAMPLES, 32), (DIM_TOKENS, DIM_BATCH, DIM_CONSTANT)),
}


def token_of(x, name):
    """A tensor like ``x`` that says of which token its elements are."""
    number = torch.arange(EXAMPLES * TOKENS).view(EXAMPLES, TOKENS)
    view = {
        "tokens of examples": lambda: number[:, :, None],
        "flattened": lambda: number.view(-1, 1),
        "heads": lambda: number[:, None, :, None],
        "heads in the batch": lambda: number.repeat_interleave(2, 0)[:, :, None],
        "weights": lambda: number.repeat_interleave(2, 0)[:, :, None],
        "tokens first": lambda: number.T[:, :, None],
    }
    return view[name]().expand(x.shape)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("live", [Live.UNPADDED, Live.FIRST])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_are_those_of_their_tokens(name, live, transposed):
    shape, roles = SHAPES[name]
    rows = Rows(inputs([TOKENS, 5, 1]))
    memory = torch.empty(shape)
    if transposed:  # other strides over the same memory
        first = math.prod(shape[:-1])
        memory = memory.view(first, shape[-1]).view(shape)
        order = [1, 0, *range(2, len(shape))]
        memory, roles = memory.permute(order), tuple(roles[d] for d in order)
    picked = rows.of(live, tuple(memory.shape), memory.stride(), roles)
    tokens = token_of(torch.empty(shape), name)
    expected = rows.masks[live].view(-1)[tokens].reshape(len(picked), -1)
    assert torch.equal(expected, picked[:, None].expand_as(expected))


@pytest.mark.parametrize(
    ("shape", "roles", "why"),
    [
        ((EXAMPLES, 32, TOKENS), (DIM_BATCH, DIM_CONSTANT, DIM_TOKENS), "a row is one element"),
        ((EXAMPLES, TOKENS, 8), (DIM_BATCH, DIM_TOKENS, DIM_CONSTANT), "rows are short"),
        ((7, TOKENS, 32), (DIM_BATCH, DIM_TOKENS, DIM_CONSTANT), "no multiple of the examples"),
        ((TOKENS, 32), (DIM_TOKENS, DIM_CONSTANT), "of which example is not known"),
        ((EXAMPLES, 32), (DIM_BATCH, DIM_CONSTANT), "of which token is not known"),
        ((EXAMPLES, TOKENS, 32), (DIM_BATCH, DIM_TOKENS), "roles of another shape"),
        ((EXAMPLES, 0, 32), (DIM_BATCH, DIM_TOKENS, DIM_CONSTANT), "nothing there"),
    ],
)
def test_what_cannot_be_told_apart_is_whole(shape, roles, why):
    x = torch.empty(shape)
    rows = Rows(inputs([TOKENS, 5, 1]))
    assert rows.of(Live.UNPADDED, shape, x.stride(), roles) is None, why


def test_without_padding_there_is_no_such_kind():
    assert set(Rows(inputs([TOKENS] * EXAMPLES)).masks) == {Live.FIRST}
    wrong = ((), {**inputs([3, 4, 5])[1], "attention_mask": torch.zeros(2, 2)})
    assert set(Rows(wrong).masks) == {Live.FIRST}
    assert not Rows(((torch.zeros(4, 3),), {})).masks


def test_the_batch_is_counted():
    assert Rows(inputs([TOKENS, 5, 1])).batch == Batch(EXAMPLES, TOKENS, TOKENS + 6)
    counted = Batch(EXAMPLES, TOKENS, TOKENS + 6)
    kinds = Live.ALL, Live.UNPADDED, Live.FIRST
    assert [counted.kept(kind) for kind in kinds] == [EXAMPLES * TOKENS, TOKENS + 6, EXAMPLES]
    assert Batch(EXAMPLES, TOKENS).kept(Live.UNPADDED) == EXAMPLES * TOKENS


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(1, 5))
def test_spread_undoes_take(which, width):
    picked = torch.tensor(which)
    x = torch.arange(1.0, len(which) * width + 1)
    kept = take(x, picked)
    assert kept.numel() == int(picked.sum()) * width
    again = spread(kept, picked, torch.full_like(x, math.nan))
    assert torch.equal(again.view(-1, width), x.view(-1, width) * picked[:, None])


# --- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "llama"])
def test_gradients_are_exact(name):
    model, data = build(name), padded(name)
    if "labels" in data and data["labels"].dim() == 2:
        data["labels"] = data["labels"].masked_fill(data["attention_mask"] == 0, -100)
    exact = gradients(model, data)
    ratios = []
    for skip in (True, False):
        with compressed(model, skip_padding=skip) as daf:
            for _ in range(2):
                found = gradients(model, data)
            ratios.append(daf.report.ratio)
            assert bool(sites(daf, Live.UNPADDED)) is skip
            for key, value in exact.items():
                torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-8)
    assert ratios[0] > 1.2 * ratios[1]


def test_a_last_layer_keeps_the_first_token_alone():
    model = build("bert")
    with compressed(model) as daf:
        gradients(model, batch("bert"))
        first = sites(daf, Live.FIRST)
    layers = sorted({name.split("encoder.layer.")[1][0] for name in first if "layer." in name})
    assert len(first) >= 3
    assert len(layers) == 1


def test_fewer_bytes_at_the_same_bits():
    held = []
    for data in (padded("bert"), batch("bert", examples=8, tokens=24)):
        model = build("bert")
        with compressed(model, allocator="fixed8") as daf:
            for _ in range(2):
                gradients(model, data)
            held.append(daf.report.held_bytes_peak)
    assert held[0] < 0.8 * held[1]


def test_what_is_read_of_padding_is_kept():
    """Mean pooling without a mask: every row counts."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            self.layers = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
            self.head = nn.Linear(32, 2)

        def forward(self, input_ids, attention_mask, labels):
            pooled = self.layers(self.embed(input_ids)).mean(1)
            return {"loss": nn.functional.cross_entropy(self.head(pooled), labels)}

    torch.manual_seed(0)
    model, data = Pooled(), padded("bert", tokens=40)
    data["input_ids"] = data["input_ids"] % 50
    exact = gradients(model, data)
    with compressed(model) as daf:
        for _ in range(2):
            found = gradients(model, data)
        assert not sites(daf, Live.UNPADDED)
    for key, value in exact.items():
        torch.testing.assert_close(found[key], value)


class Switched(nn.Module):
    """Its loss is of the tokens that are not padding, until it is told otherwise."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.all = False

    def forward(self, input_ids, attention_mask):
        x = self.layers(self.embed(input_ids))
        weight = torch.ones_like(attention_mask) if self.all else attention_mask
        return {"loss": (x.square().mean(-1) * weight).sum()}


def test_a_model_that_changes_its_mind_is_stopped():
    torch.manual_seed(0)
    model, data = Switched(), padded("bert", tokens=40)
    data = {"input_ids": data["input_ids"] % 50, "attention_mask": data["attention_mask"]}
    with compressed(model) as daf:
        model(**data)["loss"].backward()
        assert sites(daf, Live.UNPADDED)
        model.all = True
        loss = model(**data)["loss"]
        with pytest.raises(
            RuntimeError, match=r"more than tokens that are not padding.*skip_padding=False"
        ):
            loss.backward()
    with compressed(model, skip_padding=False):
        model(**data)["loss"].backward()


def test_nothing_is_left_behind():
    model, data = build("bert"), padded("bert")
    with compressed(model) as daf:
        for _ in range(2):
            loss = model(**data).loss
            compressor = daf._session.compressor
            kinds = {type(p()) for p in compressor._physicals.values()}
            assert LiveRows in kinds or _ == 0
            loss.backward()
            del loss
            assert compressor.held_bytes() == 0


def test_a_reader_that_calibration_did_not_see_gets_all_rows():
    """A probe on a hidden state: of a tensor that is stored by rows, or derived from one."""
    model, data = build("bert"), padded("bert")
    probe = nn.Linear(64, 3)
    weight = torch.randn(8, 24, 3, generator=torch.Generator().manual_seed(0))

    def step(scope):
        probe.weight.grad = None
        model.zero_grad()
        torch.manual_seed(0)
        with scope:
            outputs = model(**data, output_hidden_states=True)
            read = probe(outputs.hidden_states[1].detach())
            loss = outputs.loss + (read * weight).sum()
        loss.backward()
        return probe.weight.grad.clone()

    exact = step(contextlib.nullcontext())
    with compressed(model) as daf:
        found = [step(contextlib.nullcontext()) for _ in range(3)]
        assert sites(daf, Live.UNPADDED)
    for value in found:
        torch.testing.assert_close(value, exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))


@pytest.mark.parametrize("lengths", [[0, 24, 3], [24, 24, 24]])
def test_padding_at_the_start_is_stored(lengths):
    args, kwargs = inputs(lengths, 24)
    flipped = {**kwargs, "attention_mask": kwargs["attention_mask"].flip(1)}
    assert Live.UNPADDED not in Rows((args, kwargs)).masks
    assert (Live.UNPADDED in Rows((args, flipped)).masks) is False
