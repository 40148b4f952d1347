"""What is refused of a codebook, and how the refusal reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from daf_hf.codebook_check import CELLS_MAX, check_codebook
from daf_hf.codecs import binary, gelu, normal, root, uniform
from daf_hf.kernels.format import Statistics

GOOD = replace(normal(), name="mine")


def lut(change):
    codes = GOOD.lut.clone()
    change(codes)
    return codes


def tables(bits, change):
    changed = [table.clone() for table in GOOD.tables]
    change(changed[bits])
    return tuple(changed)


@pytest.mark.parametrize("book", [uniform(), normal(), root(), GOOD], ids=lambda book: book.name)
def test_those_there_are_pass(book):
    check_codebook(book)


@pytest.mark.parametrize("book", [gelu(), binary()], ids=lambda book: book.name)
def test_those_that_serve_special_readers_alone_do_not(book):
    with pytest.raises(ValueError, match=f"codebook '{book.name}'"):
        check_codebook(book)


BAD = [
    ({"name": "a+b"}, "use a name of letters"),
    ({"name": 3}, "use a name of letters"),
    ({"statistics": Statistics.PAIR}, "statistics=.*use one of"),
    ({"statistics": "moments"}, "statistics='moments': use one of"),
    ({"grid_origin": float("nan")}, "grid_origin=nan: use a finite number"),
    ({"grid_density": "1"}, "grid_density='1': use a finite number"),
    ({"grid_density": 0.0}, r"grid_density=0\.0: use a positive"),
    ({"cells": 1}, "cells=1: use an integer from 2"),
    ({"cells": CELLS_MAX + 1}, f"use an integer from 2 to {CELLS_MAX}"),
    ({"lut": None}, "cells=4096: without a lut"),
    ({"lut": GOOD.lut.int()}, r"lut: use .* torch.uint8 tensor \[cells=4096\].* not torch.int32"),
    ({"lut": GOOD.lut[:-1]}, r"lut: .* \[4095\]"),
    ({"lut": GOOD.lut.numpy()}, "lut: .* not ndarray"),
    ({"lut": GOOD.lut.repeat_interleave(2)[::2]}, "lut: use a contiguous"),
    ({"lut": lut(lambda codes: codes.__setitem__(2000, 0))}, "lut falls after cell 1999"),
    ({"tables": GOOD.tables[:8]}, "tables: use a tuple of 9"),
    ({"tables": list(GOOD.tables)}, "tables: use a tuple of 9"),
    ({"tables": tuple(t.double() for t in GOOD.tables)}, r"tables\[0\]: .* not torch.float64"),
    ({"tables": tuple(reversed(GOOD.tables))}, r"tables\[0\]: .*\[1\].* not .*\[256\]"),
    ({"tables": tables(3, lambda t: t.__setitem__(1, np.nan))}, r"tables\[3\]: .* be finite"),
    ({"tables": tables(2, lambda t: t.copy_(t.flip(0)))}, r"tables\[2\] falls after code 0"),
    (
        {"tables": tables(1, lambda t: t.mul_(3))},
        r"tables\[1\]\[0\] is -2\.39.*not between -1\.\d+ and -0\.\d+, .* 2-bit codes",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(ValueError, match=f"^codebook .*{message}"):
        check_codebook(replace(GOOD, **changes))


def test_codes_that_are_never_written_may_have_any_value():
    codes = (GOOD.lut.int() // 2 * 2).to(torch.uint8)
    changed = [table.clone() for table in GOOD.tables]
    changed[8][1::2] = -7.0
    check_codebook(replace(GOOD, lut=codes, tables=tuple(changed)))
