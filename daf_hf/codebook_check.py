"""What a codebook must be for every kernel to encode and decode with it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .kernels.format import MAX_BITS, Codebook, Statistics

CELLS_MAX = 1 << 14
"""Kernels count cells in 16 bits, and CUDA's keep the look-up table in a block's shared memory."""

_ROUNDING = 1e-5
_OF_USERS = (Statistics.NONE, Statistics.RANGE, Statistics.MOMENTS)


def check_codebook(book: Codebook) -> None:
    """Refuse a codebook that kernels cannot serve, or whose parts contradict each other.

    Raises:
        ValueError: naming the codebook, what is wrong, and what would work.
    """
    for problem in _problems(book):
        raise ValueError(f"codebook {book.name!r}: {problem}")


def _problems(book: Codebook) -> Iterator[str]:
    """What is wrong; what comes later may rely on what came before."""
    if not isinstance(book.name, str) or not re.fullmatch(r"\w[\w.-]*", book.name):
        yield "use a name of letters, digits, '_', '.' and '-'"
    if book.statistics not in _OF_USERS:
        names = [f"Statistics.{statistics.name}" for statistics in _OF_USERS]
        yield f"statistics={book.statistics!r}: use one of {names}"
    for name in ("grid_origin", "grid_density"):
        value = getattr(book, name)
        if not isinstance(value, Real) or not math.isfinite(value):
            yield f"{name}={value!r}: use a finite number"
    if not book.grid_density > 0:
        yield f"grid_density={book.grid_density!r}: use a positive number of cells per unit"
    yield from _problems_of_the_codes(book)
    yield from _problems_of_the_values(book)


def _problems_of_the_codes(book: Codebook) -> Iterator[str]:
    if book.lut is None:
        if book.cells != 1 << MAX_BITS:
            yield f"cells={book.cells!r}: without a lut a cell is a code, so use 256"
        return
    if not isinstance(book.cells, int) or not 2 <= book.cells <= CELLS_MAX:
        yield f"cells={book.cells!r}: use an integer from 2 to {CELLS_MAX}"
    if not _is_vector(book.lut, torch.uint8, book.cells):
        yield (
            f"lut: use a contiguous torch.uint8 tensor [cells={book.cells}] on the CPU, not "
            f"{_described(book.lut)}"
        )
    falls = torch.nonzero(book.lut.int().diff() < 0).flatten()
    if len(falls):
        yield (
            f"lut falls after cell {int(falls[0])}: an error is measured in the values themselves, "
            "so codes must not fall where values rise"
        )


def _problems_of_the_values(book: Codebook) -> Iterator[str]:
    if not isinstance(book.tables, tuple) or len(book.tables) != MAX_BITS + 1:
        yield f"tables: use a tuple of {MAX_BITS + 1}, the values for 0 to {MAX_BITS} bits"
    for bits, table in enumerate(book.tables):
        if not _is_vector(table, torch.float32, 1 << bits):
            yield (
                f"tables[{bits}]: use a contiguous torch.float32 tensor [{1 << bits}] on the CPU, "
                f"not {_described(table)}"
            )
        if not bool(table.isfinite().all()):
            yield f"tables[{bits}]: its values must be finite"
    for bits, table in enumerate(book.tables):
        used = _used(book, bits)
        falls = torch.nonzero(table[used].diff() < 0).flatten()
        if len(falls):
            yield f"tables[{bits}] falls after code {int(used[falls[0]])}: values must not"
    for bits in range(MAX_BITS):
        code = _not_embedded(book, bits)
        if code is not None:
            one, other = book.tables[bits + 1][2 * code : 2 * code + 2].tolist()
            yield (
                f"tables[{bits}][{code}] is {float(book.tables[bits][code]):g}, which is not "
                f"between {one:g} and {other:g}, the values of the {bits + 1}-bit codes that "
                "begin with it: a code of fewer bits is the top of a longer one"
            )


def _used(book: Codebook, bits: int) -> Tensor:
    """The codes of this width that are ever written, in ascending order."""
    codes = torch.arange(1 << MAX_BITS) if book.lut is None else book.lut.long()
    return (codes >> (MAX_BITS - bits)).unique()


def _not_embedded(book: Codebook, bits: int) -> int | None:
    """A code whose value is not between those of the two that it splits into, both in use."""
    longer = torch.zeros(2 << bits, dtype=torch.bool)
    longer[_used(book, bits + 1)] = True
    low, high = book.tables[bits + 1].view(-1, 2).unbind(1)
    slack = _ROUNDING * max(float(low.abs().max()), float(high.abs().max()))
    value = book.tables[bits]
    outside = (value < low - slack) | (value > high + slack)
    found = torch.nonzero(outside & longer.view(-1, 2).all(1)).flatten()
    return int(found[0]) if len(found) else None


def _is_vector(value: Any, dtype: torch.dtype, length: int) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype is dtype
        and value.shape == (length,)
        and value.device.type == "cpu"
        and value.is_contiguous()
    )


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype} {list(value.shape)} on {value.device}"
