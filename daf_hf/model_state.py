"""What measurements do to a model's buffers and to random states, and take back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """RNG states (torch, numpy, Python) and buffers are afterwards what they were."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device.index or 0]
    kind = "cuda" if device.type == "cpu" else device.type
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with (
            torch.random.fork_rng(devices, device_type=kind),
            unversioned([buffer for _, _, buffer, _ in buffers]),
        ):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, name, buffer, before in buffers:
            module._buffers[name] = buffer
            if not _equal(buffer, before):
                with torch.no_grad(), unversioned([buffer]):
                    if buffer.shape != before.shape:  # torch.ao's observers resize theirs
                        buffer.resize_(before.shape)
                    buffer.copy_(before)


def _equal(buffer: Tensor, before: Tensor) -> bool:
    """Whether a buffer is as it was, where that can be told."""
    if buffer.is_meta:
        return True
    try:
        return torch.equal(buffer, before)
    except (NotImplementedError, RuntimeError):  # of sparse tensors, and of some subclasses
        return False


@contextmanager
def unversioned(tensors: Sequence[Tensor]) -> Iterator[None]:
    """In-place changes inside do not count as such for graphs that are alive."""
    with _unsafe_preserve_version_counter(tuple(tensors)):
        yield
