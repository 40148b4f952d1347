"""Liger-Kernel's fused loss in the place of our own chunks: same losses, same gradients.

It is used on GPUs. Here its Triton kernels are interpreted on the CPU, which needs
TRITON_INTERPRET=1 from outside (`make test-triton`).
"""

from __future__ import annotations

import logging
import os
import sys

import pytest
import torch
from test_chunked_loss import adapted, assert_equal_steps, causal_lm, padded
from torch import nn

from daf_hf import compress_activations, liger
from daf_hf.vocabulary import chunk_losses

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten():
    liger._load.cache_clear()
    yield
    liger._load.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """What Liger-Kernel is called with, on the CPU too; skips where it cannot run."""
    pytest.importorskip("liger_kernel")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1 from outside")
    monkeypatch.setattr(liger, "DEVICE_TYPES", {"cpu"})
    liger_loss, seen = liger.fused_loss(CPU), []

    def counted(*args, **options):
        seen.append(options)
        return liger_loss(*args, **options)

    monkeypatch.setattr(liger, "_load", lambda: counted)
    yield seen


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "opt"])
def test_a_frozen_head_under_adapters(kind, calls):
    assert_equal_steps(adapted(kind))
    assert len(calls) == 1


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_trained(tied, calls):
    assert_equal_steps(causal_lm("llama", bias=True, tie_word_embeddings=tied))
    assert len(calls) == 1


def test_a_loss_over_the_items_of_a_whole_batch(calls):
    assert_equal_steps(adapted(), num_items_in_batch=torch.tensor(11))
    assert len(calls) == 1


def test_no_label_at_all(calls):
    restore = chunk_losses(model := adapted(), True)
    inputs = {**padded(), "labels": torch.full((3, 9), -100)}
    loss = model(**inputs, num_items_in_batch=1).loss
    loss.backward()
    restore()
    assert loss == 0 and len(calls) == 1
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_label_smoothing_and_another_index(calls):
    def loss(model, inputs):
        logits = model(inputs["input_ids"]).logits
        entropy = nn.CrossEntropyLoss(ignore_index=7, label_smoothing=0.2)
        return entropy(logits.flatten(0, 1).float(), inputs["input_ids"].flatten())

    def reshaped(model, inputs):
        logits = model(inputs["input_ids"]).logits
        entropy = nn.CrossEntropyLoss(ignore_index=7, label_smoothing=0.2)
        return entropy(logits.view(-1, logits.shape[-1]), inputs["input_ids"].view(-1))

    assert_equal_steps(adapted(), reshaped)
    assert len(calls) == 1
    assert_equal_steps(adapted(), loss)  # flatten() asks for whole logits
    assert len(calls) == 1


def test_targets_of_one_byte(calls):
    def loss(model, inputs):
        logits = model(inputs["input_ids"]).logits
        return nn.functional.cross_entropy(
            logits.view(-1, logits.shape[-1]), inputs["input_ids"].view(-1).to(torch.uint8)
        )

    assert_equal_steps(adapted(), loss)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_under_autocast(kind, calls):
    def loss(model, inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return model(**inputs).loss

    assert_equal_steps(adapted(kind), loss, tolerance=0.05)
    assert len(calls) == 1


def test_a_model_in_bfloat16(calls):
    assert_equal_steps(adapted().bfloat16(), tolerance=0.05)
    assert len(calls) == 1


def test_a_soft_cap_is_for_our_own_chunks(calls):
    assert_equal_steps(adapted("gemma2"))
    assert calls == []


def test_backward_twice_through_a_retained_graph(calls):
    """Liger-Kernel itself scales what it saved in place, so that a second time scales twice."""
    restore = chunk_losses(model := adapted(), True)
    loss = model(**padded()).loss
    parameters = [p for p in model.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss / 3, parameters, retain_graph=True)
    second = torch.autograd.grad(loss / 3, parameters)
    restore()
    assert all(map(torch.equal, first, second)) and len(calls) == 1


def test_under_compression(calls):
    model = adapted()
    model(**padded()).loss.backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with compress_activations(model, chunked_loss=True):
        model(**padded()).loss.backward()
    assert calls
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, plain, strict=True)
    )


# --- where it is not there -------------------------------------------------------------------


def test_it_is_for_gpus():
    assert liger.fused_loss(CPU) is None


def test_nothing_is_said_where_it_is_not_installed(monkeypatch, caplog):
    monkeypatch.setattr(liger, "DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    assert liger.fused_loss(CPU) is None
    assert caplog.messages == []


def test_one_that_cannot_be_imported_is_told_of_once(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "daf_hf")
    monkeypatch.setattr(liger, "DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr(liger, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", None)
    assert liger.fused_loss(CPU) is None
    assert liger.fused_loss(CPU) is None
    assert len(caplog.messages) == 1 and "Liger-Kernel" in caplog.text
