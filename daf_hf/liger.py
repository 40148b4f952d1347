"""Liger-Kernel's fused loss, where it is installed and can serve.

Liger-Kernel (Hsu et al. 2024, arXiv 2410.10989) computes a linear head and its cross-entropy chunk
by chunk in Triton: the loss and the logits' gradient in one kernel, in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

logger = logging.getLogger("daf_hf")

DEVICE_TYPES = {"cuda"}
"""Where it is used: its kernels are written for GPUs."""


def fused_loss(device: torch.device) -> Callable[..., Tensor] | None:
    """``liger_fused_linear_cross_entropy``; None where it cannot serve tensors on ``device``."""
    return _load() if device.type in DEVICE_TYPES else None


@cache
def _load() -> Callable[..., Tensor] | None:
    if find_spec("liger_kernel") is None:
        return None
    try:
        from liger_kernel.transformers.functional import (  # type: ignore[import-not-found]
            liger_fused_linear_cross_entropy,
        )
    except Exception as error:  # of Triton, a driver, another version: no list is complete
        logger.warning("daf_hf: Liger-Kernel is installed, but cannot be imported: %r", error)
        return None
    return liger_fused_linear_cross_entropy
