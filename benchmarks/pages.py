"""One tensor, encoded into pages of its own."""

from __future__ import annotations

import random
from array import array

import torch
from torch import Tensor

from daf_hf.codecs import Codec
from daf_hf.kernels import Backend
from daf_hf.kernels.format import PAGE_BYTES, PageSpace


class Encoded:
    """Pages for a tensor, and the calls that fill and read them.

    Args:
        backend: what encodes and decodes.
        x: the tensor; its last dimension are the columns.
        codec: how.
        bits: the width.
        scattered: the pages do not lie in order, and there are several segments.
        out: what :meth:`decode` writes, flat, where there is something already.

    Attributes:
        moved_bytes: what encoding reads and writes, and decoding too.
        restored: ``out``.
    """

    def __init__(
        self,
        backend: Backend,
        x: Tensor,
        codec: Codec,
        bits: int,
        scattered: bool = False,
        out: Tensor | None = None,
    ) -> None:
        self._backend, self._flat, self._bits = backend, x.flatten(), bits
        self._layout = codec.layout(x.numel(), x.shape[-1], bits)
        count = self._layout.pages(bits)
        size = 4 if scattered else 1 << max(count - 1, 0).bit_length()
        segments = [
            torch.zeros(size * PAGE_BYTES, dtype=torch.uint8, device=x.device)
            for _ in range(-(-count // size) or 1)
        ]
        pointers = array("q", [segment.data_ptr() for segment in segments])
        self._space = PageSpace(size, [*segments], pointers)
        numbers = list(range(len(segments) * size))
        if scattered:
            random.Random(count).shuffle(numbers)
        self._table = array("i", numbers[:count])
        self.moved_bytes = x.nbytes + count * PAGE_BYTES
        self.restored = torch.zeros_like(self._flat) if out is None else out

    def encode(self) -> bool:
        """Fill the pages; whether the backend could."""
        return self._backend.encode(self._flat, self._layout, self._bits, self._table, self._space)

    def decode(self) -> None:
        """Read the pages into ``restored``."""
        self._backend.decode(self.restored, self._layout, self._bits, self._table, self._space)

    def pages(self) -> Tensor:
        """The bytes of the pages, in the table's order, on the CPU."""
        segments = [segment for segment in self._space.segments if segment is not None]
        return torch.cat(segments).cpu().view(-1, PAGE_BYTES)[list(self._table)]


def sample(
    codec: Codec, rows: int, cols: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """A tensor of the kind that ``codec`` is made for."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, cols, generator=generator, device=device)
    if codec.lossless:
        x = (x > -1.28).float() / 0.9
    elif codec.codebook == "root":
        x = x.softmax(-1)
    return x.to(dtype)
