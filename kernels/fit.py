"""Whether what a backend is asked for fits together."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from .format import MAX_BITS, Layout, Statistics

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.uint8, torch.bool)
"""Dtypes that backends take; those that are not floats only with a ``PAIR`` codebook."""


def check_fit(x: Tensor, layout: Layout, bits: int, table: array, device: torch.device) -> None:
    """Check what ``encode`` or ``decode`` is given.

    Raises:
        ValueError: ``x`` is of another dtype, size or device, or not contiguous; ``bits`` is not
            in 0..8; or ``table`` is too short.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"dtype {x.dtype} is not supported: use one of {list(DTYPES)}")
    if x.numel() != layout.numel or not x.is_contiguous() or x.device != device:
        raise ValueError(
            f"expected a contiguous tensor of {layout.numel} elements on {device}, "
            f"got shape {tuple(x.shape)}, strides {x.stride()}, device {x.device}"
        )
    if not 0 <= bits <= MAX_BITS or len(table) < layout.pages(bits):
        raise ValueError(
            f"{bits} bits need 0 <= bits <= {MAX_BITS} and {layout.pages(bits)} pages, "
            f"got a table of {len(table)}"
        )


def check_encodable(x: Tensor, layout: Layout, bits: int) -> None:
    """Check that the codebook of ``layout`` takes ``x`` at ``bits`` bits.

    Raises:
        ValueError: it does not.
    """
    if layout.codebook.statistics is Statistics.PAIR:
        if bits != 1:
            raise ValueError(f"a two-valued tensor is encoded at 1 bit, not {bits}")
    elif x.dtype not in FLOATS:
        raise ValueError(f"codebook {layout.codebook.name!r} cannot encode {x.dtype}")
