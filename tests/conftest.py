"""Fixtures: tiny models and batches (see tiny.py), and freed memory that does not lie still."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import settings
from tiny import MODELS, batch, build, hooks_on_stack

from daf_hf.arena import Arena

pytest_plugins = ["compatibility_matrix"]

settings.register_profile("daf_hf", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("daf_hf")


@pytest.fixture(params=MODELS)
def any_model(request):
    """Each model with a batch: (name, model, inputs)."""
    return request.param, build(request.param), batch(request.param)


@pytest.fixture
def bert_model():
    return build("bert")


@pytest.fixture
def bert_batch():
    return batch("bert")


@pytest.fixture
def freed_pages_are_noise(monkeypatch):
    """Pages are overwritten as soon as they are free."""
    give_back = Arena._give_back

    def poison(self, stored, keep):
        per = self.space.pages_per_segment
        for page in stored.table[keep:]:
            self.space.segments[page // per].view(-1, 1024)[page % per] = 0xFF
        give_back(self, stored, keep)

    monkeypatch.setattr(Arena, "_give_back", poison)


@pytest.fixture
def collected():
    """Nothing waits for the garbage collector, before or after."""
    gc.collect()
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def no_hook_is_left():
    """No test leaves saved-tensors hooks behind, nor another number of threads."""
    threads = torch.get_num_threads()
    yield
    assert hooks_on_stack() is None
    torch.set_num_threads(threads)


def pytest_configure(config):
    # peft and TRL still use transformers' old name; Lightning an old one of torch's.
    smoothing = "label_smoothing_factor. is deprecated in .SFTTrainer"
    prefix = "past_key_values. is deprecated"  # PEFT's prefix tuning
    for text in ("gradient_checkpointing. is deprecated", "treespec, LeafSpec", smoothing, prefix):
        config.addinivalue_line("filterwarnings", f"ignore:.*{text}.*:FutureWarning")
    # Dynamo asks it of every tensor with which it goes on after a break of the graph.
    config.addinivalue_line(
        "filterwarnings", "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    )
