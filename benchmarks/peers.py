"""Other quantizers on CPUs, to compare with: plain torch, compiled torch, bitsandbytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

GROUP = 256
"""Elements that share a minimum and a range, or bitsandbytes' largest magnitude."""

_SMALLEST = 1e-30


@dataclass(frozen=True)
class Peer:
    """Another quantizer at one width.

    Attributes:
        backend, granularity, codebook, bits: what it is called.
        encode: packs a tensor of whole groups.
        decode: restores what ``encode`` gave.
        size: bytes of what ``encode`` gave.
    """

    backend: str
    granularity: str
    codebook: str
    bits: int
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]
    size: Callable[[Any], int]


def torch_peers(widths: Iterable[int], compiled: bool) -> list[Peer]:
    """Minimum and range by group, as plain torch or compiled. Compiling waits for a first call."""
    wrap = partial(torch.compile, fullgraph=True, dynamic=False) if compiled else lambda call: call
    return [
        Peer(
            "torch-compile" if compiled else "torch-eager",
            "group",
            "uniform",
            bits,
            partial(wrap(quantize), bits=bits),
            partial(wrap(dequantize), bits=bits),
            lambda packed: sum(part.nbytes for part in packed[0]) + 2 * packed[1].nbytes,
        )
        for bits in widths
    ]


Packed = tuple[list[Tensor], Tensor, Tensor]
"""Fields of codes, minima, steps."""


def quantize(x: Tensor, bits: int) -> Packed:
    """Equal bins between each group's minimum and maximum, as codes of really ``bits`` bits.

    Statistics are kept as the kernels keep theirs: bf16 up to 4 bits, fp32 above.
    """
    kept = torch.float32 if bits > 4 else torch.bfloat16
    groups = x.reshape(-1, GROUP).float()
    low, high = groups.aminmax(dim=1, keepdim=True)
    step = ((high - low) / (1 << bits)).clamp_min(_SMALLEST).to(kept)
    low = low.to(kept)
    codes = (groups - low.float()).mul_(step.float().reciprocal())
    codes = codes.clamp_(0, (1 << bits) - 1).to(torch.uint8)
    return pack(codes, bits), low, step


def dequantize(packed: Packed, bits: int) -> Tensor:
    """The bins' centres, flat, in fp32."""
    fields, low, step = packed
    values = unpack(fields, bits).float()
    return values.add_(0.5).mul_(step.float()).add_(low.float()).view(-1)


def fields_of(bits: int) -> list[tuple[int, int]]:
    """Fields of 8, 4, 2 or 1 bits that make up a code: (width, shift), highest bits first."""
    widths = [width for width in (8, 4, 2, 1) if bits & width]
    return [(width, sum(widths[index + 1 :])) for index, width in enumerate(widths)]


def pack(codes: Tensor, bits: int) -> list[Tensor]:
    """Codes ``uint8 [groups, GROUP]`` as bytes full of one field after another."""
    packed = []
    for width, shift in fields_of(bits):
        field = (codes >> shift) & ((1 << width) - 1)
        parts = field.view(-1, 8 // width, GROUP * width // 8).unbind(1)
        byte = parts[0]
        for index, part in enumerate(parts[1:], 1):
            byte = byte | (part << (index * width))
        packed.append(byte)
    return packed


def unpack(packed: list[Tensor], bits: int) -> Tensor:
    """What :func:`pack` was given."""
    codes = None
    for (width, shift), byte in zip(fields_of(bits), packed, strict=True):
        mask = (1 << width) - 1
        parts = [(byte >> (index * width)) & mask for index in range(8 // width)]
        field = torch.stack(parts, 1).view(-1, GROUP) << shift
        codes = field if codes is None else codes | field
    assert codes is not None, f"bits={bits}: use 1 to 8"
    return codes


def bitsandbytes_peers(widths: Iterable[int]) -> list[Peer]:
    """Bitsandbytes' blockwise 8-bit quantizer, and nf4 and fp4, at those of ``widths`` it has.

    Raises:
        ImportError: it is not installed.
    """
    # On some processors it looks for optional kernels, and warns that it found none.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from bitsandbytes import functional

    def peer(codebook: str, bits: int, encode: Callable, decode: Callable) -> Peer:
        def size(packed: tuple[Tensor, Any]) -> int:
            return packed[0].nbytes + packed[1].absmax.nbytes

        return Peer("bitsandbytes", "group", codebook, bits, encode, decode, size)

    found = []
    if 8 in widths:
        encode = partial(functional.quantize_blockwise, blocksize=GROUP)
        found.append(peer("dynamic", 8, encode, lambda p: functional.dequantize_blockwise(*p)))
    if 4 in widths:
        for codebook in ("nf4", "fp4"):
            encode = partial(functional.quantize_4bit, blocksize=GROUP, quant_type=codebook)
            found.append(peer(codebook, 4, encode, lambda p: functional.dequantize_4bit(*p)))
    return found
