"""Random rounding in plain torch: what published sensitivities are defined by.

The kernels round to nearest, which suits training better; see docs/differences-from-the-paper.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels.format import GROUP


def _groups(values: Tensor) -> Tensor:
    """The elements by groups, ``fp32 [groups, 256]``, the last filled up with its last element."""
    flat = values.reshape(-1).float()
    missing = -len(flat) % GROUP
    if missing:
        flat = torch.cat([flat, flat[-1:].expand(missing)])
    return flat.view(-1, GROUP)


def ranges(values: Tensor) -> Tensor:
    """Maximum less minimum of each 256 consecutive elements: ``fp32 [groups]``."""
    low, high = torch.aminmax(_groups(values), dim=1)
    return high - low


def rounded_at_random(values: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Each element at one of the two nearest levels, so that its expectation is itself.

    ``2^bits`` levels from minimum to maximum of each 256 consecutive elements (Chen et al., ActNN,
    arXiv 2104.14129, section 3).

    Args:
        values: of any shape and floating-point dtype.
        bits: at least 1.
        generator: of the CPU.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        ValueError: for fewer bits: one level cannot be without bias.
    """
    if bits < 1:
        raise ValueError(f"bits={bits}: use at least 1")
    if not values.numel():
        return values.clone()
    groups = _groups(values)
    low, high = torch.aminmax(groups, dim=1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    noise = torch.rand(groups.shape, generator=generator).to(groups.device)
    codes = torch.where(step > 0, (groups - low) / step + noise, 0.0).floor_()
    restored = low + step * codes.clamp_(0, 2**bits - 1)
    return restored.view(-1)[: values.numel()].view(values.shape).to(values.dtype)
