"""Page tables and segment addresses where kernels on a device can read them."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from .format import PageSpace


def upload(table: array, space: PageSpace, device: torch.device) -> tuple[Tensor, Tensor]:
    """The page numbers ``int32 [pages]`` and segment addresses ``int64 [segments]`` on ``device``.

    Both are copies: later changes of ``table`` and ``space`` do not show in them.
    """
    return _copy(table, torch.int32, device), _copy(space.pointers, torch.int64, device)


def _copy(values: array, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    # From pageable memory: CUDA has copied it when this returns, without waiting for the device.
    return torch.frombuffer(values, dtype=dtype).to(device, copy=True, non_blocking=True)
