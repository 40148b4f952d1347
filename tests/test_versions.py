"""Versions: in-place changes are noticed, and no memory is kept for that."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from daf_hf.versions import Version


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.zero_(),
        lambda t: t[0].add_(1),
        lambda t: t.view(-1)[1:].mul_(2),
        lambda t: t.detach().zero_(),
        lambda t: t.t().copy_(t.t()),
    ],
)
def test_version_notices_changes(change):
    tensor = torch.ones(4, 4)
    version = Version(tensor)
    version.check()
    change(tensor)
    with pytest.raises(RuntimeError, match=r"shape \(4, 4\) is at version 1; expected version 0"):
        version.check()


def test_version_lets_go_of_the_memory():
    tensor = torch.ones(64, 64)
    version = Version(tensor)
    storage = weakref.ref(tensor.untyped_storage())
    data = tensor.data_ptr()
    del tensor
    gc.collect()
    assert storage() is None
    assert data
    version.check()
