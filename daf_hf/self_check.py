"""A backend against the reference, on a small tensor: for machines where no test was run."""

from __future__ import annotations

from array import array

import torch

from .codecs import BINARY, FRUGAL, GELU, GENERAL, SIGN, Codec
from .kernels import Backend, get_backend
from .kernels.format import PAGE_BYTES, Granularity, Layout, PageSpace

_CASES = (
    (GENERAL, 8, torch.float32),
    (FRUGAL, 2, torch.bfloat16),
    (Codec(Granularity.TOKEN, "normal"), 3, torch.float16),
    (Codec(Granularity.CHANNEL, "root"), 4, torch.float32),
    (Codec(Granularity.TENSOR, "uniform"), 1, torch.bfloat16),
    (GELU, 5, torch.float32),
    (SIGN, 1, torch.float32),
    (BINARY, 1, torch.float32),
)
_ROWS, _COLS = 45, 31


def self_check(backend: Backend, device: torch.device | str = "cpu") -> str:
    """What of ``backend`` differs from the reference on ``device``; empty where nothing does.

    Encodes and decodes a small tensor with one codec of every kind, and compares all bytes.
    """
    for codec, bits, dtype in _CASES:
        layout = codec.layout(_ROWS * _COLS, _COLS, bits)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(layout.numel, generator=generator, device="cpu").to(dtype)
        x = (x > 0).to(dtype) if codec == BINARY else x
        expected = _round_trip(get_backend("reference"), x, layout, bits)
        try:
            actual = _round_trip(backend, x.to(device), layout, bits)
        except RuntimeError as error:
            return f"{codec} at {bits} bits in {dtype} fails: {error}"
        for what, one, other in zip(("pages", "values"), expected, actual, strict=True):
            if not torch.equal(one, other.cpu()):
                return f"{codec} at {bits} bits in {dtype}: its {what} are not the reference's"
    return ""


def _round_trip(
    backend: Backend, x: torch.Tensor, layout: Layout, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages, and the bytes of what is restored from them."""
    count = layout.pages(bits)
    size = 1 << max(count - 1, 0).bit_length()
    segment = torch.zeros(size * PAGE_BYTES, dtype=torch.uint8, device=x.device)
    space = PageSpace(size, [segment], array("q", [segment.data_ptr()]))
    table, out = array("i", range(count)), torch.zeros_like(x)
    if not backend.encode(x, layout, bits, table, space):
        raise RuntimeError("it takes finite values for others")
    backend.decode(out, layout, bits, table, space)
    return segment, out.view(torch.uint8)
