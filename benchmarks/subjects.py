"""What kernels.py times: our backends, their peers, and dropout's noise."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from pages import Encoded, sample
from peers import Peer, bitsandbytes_peers, torch_peers
from timing import Call
from torch import Tensor

from daf_hf.codecs import GENERAL, Codec, parse_codec
from daf_hf.kernels import get_backend
from daf_hf.kernels.noise import TorchStream, streams

KEEP = 0.9
"""The probability with which dropout's noise keeps an element."""


@dataclass(frozen=True)
class Subject:
    """What a row is about; ``bits`` 0 where nothing is stored."""

    backend: str
    granularity: str
    codebook: str
    bits: int
    dtype: str
    threads: int


@dataclass
class Work:
    """How a subject is timed.

    Attributes:
        subject: what.
        x: the tensor, which memcpy copies too.
        calls: for each direction the call, and the bytes that it reads and writes.
        slow: fewer repeats must do.
    """

    subject: Subject
    x: Tensor
    calls: dict[str, tuple[Call, int]]
    slow: bool


@cache
def tensor(kind: str, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """A tensor of the kind that a codec, by name, is made for."""
    return sample(parse_codec(kind), rows, cols, dtype)


@cache
def output(numel: int, dtype: torch.dtype) -> Tensor:
    """What is written, flat, by whichever call."""
    return torch.zeros(numel, dtype=dtype)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Subjects:
    """All that the options of kernels.py ask for.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._least = min(options.threads)
        self._peers: list[Peer] | None = None

    def each(self) -> Iterator[Work]:
        """The subjects, each made when it is its turn; sets torch's number of threads."""
        parts = {"kernels": self._kernels, "peers": self._others, "noise": self._noise}
        before = torch.get_num_threads()
        try:
            for name in self._options.dtypes:
                for threads in self._options.threads:
                    torch.set_num_threads(threads)
                    for part in self._options.parts:
                        yield from parts[part](getattr(torch, name), threads)
        finally:
            torch.set_num_threads(before)

    def _beside_peers(self, dtype: torch.dtype, threads: int) -> bool:
        """Whether this is what peers are measured for: the first dtype at fewest threads."""
        return dtype_name(dtype) == self._options.dtypes[0] and threads == self._least

    def _kernels(self, dtype: torch.dtype, threads: int) -> Iterator[Work]:
        """Our own backends; the reference, which is slow, where peers are measured."""
        for name in self._options.backends:
            slow = name == "reference"
            for codec in map(parse_codec, self._options.codecs):
                if slow and not (codec == GENERAL and self._beside_peers(dtype, threads)):
                    continue
                for bits in [1] if codec.lossless else self._options.bits:
                    yield self._kernel(name, codec, bits, dtype, threads, slow)

    def _kernel(
        self, name: str, codec: Codec, bits: int, dtype: torch.dtype, threads: int, slow: bool
    ) -> Work:
        kind = codec.codebook if codec.lossless or codec.codebook == "root" else "normal"
        x = tensor(kind, self._options.rows, self._options.cols, dtype)
        out = output(x.numel(), dtype)
        pages = Encoded(get_backend(name), x, codec, bits, out=out)
        unit = codec.granularity.name.lower()
        return Work(
            Subject(name, unit, codec.codebook, bits, dtype_name(dtype), threads),
            x,
            {
                "encode": (pages.encode, pages.moved_bytes),
                "decode": (pages.decode, pages.moved_bytes),
            },
            slow,
        )

    def _others(self, dtype: torch.dtype, threads: int) -> Iterator[Work]:
        """Other quantizers."""
        if not self._beside_peers(dtype, threads):
            return
        x = tensor("normal", self._options.rows, self._options.cols, dtype)
        if self._peers is None:
            self._peers = usable_peers(self._options.peers, self._options.bits, x)
        for peer in self._peers:
            packed = peer.encode(x)
            moved = x.nbytes + peer.size(packed)
            names = peer.backend, peer.granularity, peer.codebook, peer.bits
            encode = lambda peer=peer: peer.encode(x)  # noqa: E731
            decode = lambda peer=peer, packed=packed: peer.decode(packed)  # noqa: E731
            calls: dict[str, tuple[Call, int]] = {
                "encode": (encode, moved),
                "decode": (decode, moved),
            }
            yield Work(Subject(*names, dtype_name(dtype), threads), x, calls, True)

    def _noise(self, dtype: torch.dtype, threads: int) -> Iterator[Work]:
        """Dropout's noise: native where that serves, and torch's own. One thread draws it."""
        if threads != 1:
            return
        out = output(self._options.rows * self._options.cols, dtype)
        state = torch.Generator().manual_seed(0).get_state()
        for stream in dict.fromkeys((streams(get_backend()), TorchStream)):
            slow = stream is TorchStream
            drawn = stream(state, KEEP)
            subject = Subject("torch" if slow else "cpu", "none", "noise", 0,
                              dtype_name(dtype), threads)  # fmt: skip
            draw = lambda drawn=drawn: drawn.fill(out)  # noqa: E731
            yield Work(subject, out, {"draw": (draw, out.nbytes)}, slow)


MAKERS = {
    "torch-eager": lambda widths: torch_peers(widths, False),
    "torch-compile": lambda widths: torch_peers(widths, True),
    "bitsandbytes": bitsandbytes_peers,
}


def usable_peers(names: list[str], widths: list[int], x: Tensor) -> list[Peer]:
    """Those that work here; a line for each that does not."""
    found = []
    for name in names:
        try:
            peers = MAKERS[name](widths)
            for peer in peers:
                peer.decode(peer.encode(x))
        except (ImportError, RuntimeError) as error:  # not installed, no compiler
            reason = str(error).strip().splitlines() or [type(error).__name__]
            print(f"left out: {name}: {reason[0]}", file=sys.stderr)
        else:
            found += peers
    return found
