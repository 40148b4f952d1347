"""Memory for restored tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
    assert [block.nbytes for block in workspace._blocks] == [4 * MANY, 8 * MANY]
    del kept


def test_small_tensors_share_the_block_of_a_large_one():
    workspace = Workspace()
    workspace.empty(4 * MANY, torch.float32, CPU)
    kept = [workspace.empty(MANY, torch.float32, CPU).fill_(n) for n in range(4)]
    assert [block.nbytes for block in workspace._blocks] == [16 * MANY]
    assert all(bool((tensor == n).all()) for n, tensor in enumerate(kept))
    address = kept[1].data_ptr()
    del kept[1]
    assert workspace.empty(MANY, torch.float32, CPU).data_ptr() == address
    assert workspace.empty(2 * MANY, torch.float32, CPU).data_ptr() not in range(
        kept[0].data_ptr(), kept[0].data_ptr() + 16 * MANY
    )
    assert len(workspace._blocks) == 2


def test_the_largest_as_a_whole_lets_the_others_go():
    workspace = Workspace()
    tensors = [workspace.empty(factor * MANY, torch.float32, CPU) for factor in (4, 1, 2)]
    assert len(workspace._blocks) == 3
    del tensors
    workspace.empty(3 * MANY, torch.float32, CPU)
    assert [block.nbytes for block in workspace._blocks] == [16 * MANY]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7)), max_size=30))
def test_no_two_tensors_share_memory(steps):
    workspace, alive = Workspace(), {}
    for number, (size, place) in enumerate(steps):
        alive.pop(place, None)
        tensor = workspace.empty(MANY + size * 1000, torch.float32, CPU)
        tensor[0] = tensor[-1] = number
        alive[place] = number, tensor
        del tensor
        assert all(float(t[0]) == float(t[-1]) == n for n, t in alive.values())
        extents = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for _, t in alive.values())
        assert all(end <= first for (_, end), (first, _) in itertools.pairwise(extents))


def test_clear_keeps_what_is_in_use():
    workspace = Workspace()
    tensor = workspace.empty(MANY, torch.float32, CPU).fill_(3)
    workspace.clear()
    workspace.empty(MANY, torch.float32, CPU).fill_(7)
    assert bool((tensor == 3).all())
