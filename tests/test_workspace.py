"""Memory for restored tensors."""

from __future__ import annotations

import pytest
import torch

from daf_hf.workspace import SMALLEST_BYTES, Workspace

CPU = torch.device("cpu")
MANY = SMALLEST_BYTES // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 1000, MANY, 3 * MANY])
def test_a_flat_tensor_of_that_kind(dtype, numel):
    tensor = Workspace().empty(numel, dtype, CPU)
    assert (tensor.shape, tensor.dtype, tensor.device) == ((numel,), dtype, CPU)


def test_idle_blocks_are_used_again():
    workspace = Workspace()
    tensor = workspace.empty(MANY, torch.float32, CPU)
    address = tensor.data_ptr()
    del tensor
    again = workspace.empty(MANY, torch.float32, CPU)
    assert again.data_ptr() == address


KEEP = {
    "itself": lambda t: t,
    "slice": lambda t: t[5:],
    "transposed": lambda t: t.view(2, -1).t(),
    "alias": lambda t: t.detach(),
    "array": lambda t: t.numpy(),
    "storage": lambda t: t.untyped_storage(),
}


@pytest.mark.parametrize("kind", KEEP)
def test_blocks_in_use_are_not(kind):
    workspace = Workspace()
    kept = KEEP[kind](workspace.empty(MANY, torch.float32, CPU).fill_(3))
    others = [workspace.empty(MANY, torch.float32, CPU).fill_(7) for _ in range(3)]
    if kind == "storage":
        kept = torch.empty(0).set_(kept)
    assert bool((torch.as_tensor(kept) == 3).all())
    assert len({other.data_ptr() for other in others}) == 3


def test_the_smallest_idle_block_serves():
    workspace = Workspace()
    tensors = [workspace.empty(factor * MANY, torch.float32, CPU) for factor in (4, 2, 3)]
    address = tensors[1].data_ptr()
    del tensors
    assert workspace.empty(MANY, torch.float32, CPU).data_ptr() == address


def test_idle_blocks_that_are_too_small_are_replaced():
    workspace = Workspace()
    tensors = [workspace.empty(MANY, torch.float32, CPU) for _ in range(3)]
    kept = tensors.pop()
    del tensors
    workspace.empty(2 * MANY, torch.float32, CPU)
    assert sorted(block.numel() for block in workspace._blocks) == [4 * MANY, 8 * MANY]
    del kept


def test_clear_keeps_what_is_in_use():
    workspace = Workspace()
    tensor = workspace.empty(MANY, torch.float32, CPU).fill_(3)
    workspace.clear()
    workspace.empty(MANY, torch.float32, CPU).fill_(7)
    assert bool((tensor == 3).all())
