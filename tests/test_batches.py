"""Sizes of inputs, and smaller batches cut from them."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_outputs import SequenceClassifierOutput

from daf_hf.batches import batch_of, cut, main_input, scalar_loss, signature
from daf_hf.chunked_loss import RowFunction
from daf_hf.lazy_logits import LazyLogits
from daf_hf.sites import Batch

IDS = torch.arange(8 * 16).view(8, 16)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {"input_ids": IDS}, Batch(8, 16)),
        ((IDS,), {}, Batch(8, 16)),
        ((), {"labels": torch.zeros(3), "input_ids": IDS}, Batch(8, 16)),
        ((), {"inputs_embeds": torch.zeros(8, 16, 4)}, Batch(8, 16)),
        ((), {"pixel_values": torch.zeros(8, 3, 32, 32)}, Batch(8)),
        ((torch.zeros(8, 5),), {}, Batch(8)),
        ((), {"x": [{"y": torch.zeros(7, 2)}]}, Batch(7)),
        ((torch.tensor(1.0), torch.zeros(5)), {}, Batch(5)),
        ((), {"flag": True}, Batch(1)),
        ((), {}, Batch(1)),
    ],
)
def test_size(args, kwargs, expected):
    assert batch_of((args, kwargs)) == expected


def test_main_input_goes_by_name():
    assert main_input(((), {"attention_mask": torch.ones(8, 16), "input_ids": IDS})) is IDS


def test_cut_takes_examples_and_tokens():
    inputs = {
        "input_ids": IDS,
        "labels": IDS + 1,
        "class": torch.arange(8),
        "mask": torch.ones(8, 1, 16, 16),
        "position_ids": torch.arange(16)[None],
        "scale": 3.0,
    }
    args, cut_to = cut(((), inputs), 2, Batch(3, 5))
    assert args == ()
    assert torch.equal(cut_to["input_ids"], IDS[2:5, :5])
    assert torch.equal(cut_to["labels"], IDS[2:5, :5] + 1)
    assert torch.equal(cut_to["class"], torch.tensor([2, 3, 4]))
    assert cut_to["mask"].shape == (3, 1, 5, 5)
    assert cut_to["scale"] == 3.0
    assert cut_to["labels"].view(-1).shape == (15,)  # as models do


def test_cut_keeps_padding_where_there_is_some():
    mask = torch.ones(8, 16)
    mask[3, 9:] = 0
    _, cut_to = cut(((), {"input_ids": IDS, "attention_mask": mask}), 2, Batch(2, 4))
    assert torch.equal(cut_to["input_ids"], IDS[2:4][:, [0, 1, 2, 15]])
    assert cut_to["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    _, cut_to = cut(((), {"input_ids": IDS, "attention_mask": mask.flip(1)}), 2, Batch(2, 4))
    assert torch.equal(cut_to["input_ids"], IDS[2:4][:, [0, 8, 9, 10]])
    assert cut_to["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]


@pytest.mark.parametrize("tokens", [1, 3, 6, 10])
def test_cut_takes_the_tokens_that_have_labels(tokens):
    """A loss on the reply alone has no gradient in the prompt."""
    labels = torch.full((8, 16), -100)
    labels[:, 9:13] = 5
    labels[5, 2:] = 5  # of another example
    inputs = {"input_ids": IDS, "labels": labels, "attention_mask": torch.ones(8, 16)}
    _, cut_to = cut(((), inputs), 2, Batch(2, tokens))
    assert cut_to["input_ids"].shape == (2, tokens)
    whole = min(tokens, 4) if tokens <= 3 or tokens > 6 else tokens - 3
    assert (cut_to["labels"] != -100).sum() >= 2 * whole
    assert torch.equal(
        cut_to["input_ids"] - cut_to["input_ids"][:, :1], IDS[:2, :tokens] - IDS[:2, :1]
    )


@pytest.mark.parametrize("size", [6, 16])
def test_cut_keeps_a_single_label_beside_padding(size):
    """It is not at the end, where padding comes, nor at the start, whose label no loss counts."""
    labels, mask = torch.full((8, 32), -100), torch.ones(8, 32)
    labels[:, 23] = 5
    mask[3, 25:] = 0
    ids = torch.arange(8 * 32).view(8, 32)
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    _, cut_to = cut(((), inputs), 2, Batch(2, size))
    assert (cut_to["labels"][:, 1:] != -100).sum() == 2
    assert cut_to["attention_mask"][1, -1] == 0


def test_cut_takes_the_first_tokens_where_nothing_tells_them_apart():
    labels = torch.full((8, 16), -100)
    inputs = {"input_ids": IDS, "labels": labels}
    assert torch.equal(cut(((), inputs), 0, Batch(2, 3))[1]["input_ids"], IDS[:2, :3])


def test_cut_leaves_the_inputs_alone():
    before = IDS.clone()
    _, kwargs = cut(((), {"input_ids": IDS}), 0, Batch(8, 16))
    kwargs["input_ids"] = None
    assert torch.equal(IDS, before)


def test_signature_tells_shapes_apart():
    def of(*shape):
        return signature(((), {"input_ids": torch.zeros(shape)}))

    assert of(2, 3) == of(2, 3) != of(3, 2)


trained = torch.ones(3, requires_grad=True)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"loss": trained.sum()}, 3.0),
        (SequenceClassifierOutput(loss=trained.sum(), logits=trained), 3.0),
        ({"loss": trained * 2}, 2.0),
        (trained.sum(), 3.0),
        ((trained.sum(), trained), 3.0),
    ],
)
def test_loss_of_outputs(outputs, expected):
    assert scalar_loss(outputs, 0).item() == expected


@pytest.mark.parametrize(
    "outputs",
    [
        trained * 1,
        {"logits": trained * 1},
        [{"a": (trained * 1,)}],
        {"loss": None, "x": trained * 1},
    ],
)
def test_without_a_loss_outputs_are_projected(outputs):
    first, again, other = (scalar_loss(outputs, seed) for seed in (0, 0, 1))
    assert first.shape == ()
    assert first.requires_grad
    assert first == again != other


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="no output of the model depends"):
        scalar_loss({"loss": torch.ones(())}, 0)


def test_without_a_loss_logits_that_are_never_whole_are_measured_against_tokens_of_their_own():
    """In expectation the gradient is 0, as it is where a model fits what it has learnt."""
    torch.manual_seed(0)
    hidden = torch.randn(1, 4).expand(6000, 4).clone().requires_grad_()
    weight = torch.randn(9, 4)
    logits = LazyLogits(hidden, weight, None, RowFunction())
    scalar_loss({"logits": logits.view(2, 3000, 9)}, 0).backward()
    assert logits._whole is None
    assert hidden.grad is not None
    typical = hidden.grad.square().mean(0).sqrt()
    assert (typical > 0.1).all()
    assert (hidden.grad.mean(0).abs() < 5 * typical / 6000**0.5).all()
    other = hidden.detach().clone().requires_grad_()
    scalar_loss({"logits": LazyLogits(other, weight, None, RowFunction())}, 1).backward()
    assert not torch.equal(other.grad, hidden.grad)  # type: ignore[arg-type]
