"""Triton kernels that take statistics: of units, and of columns in two stages.

Columns, and the whole tensor as 32 of them, are reduced by blocks of rows first. Sums keep the
order that the format fixes: partials, and then a fold of them in sequence. Ranges do not depend on
the order, and are reduced as integers that order as the floats do: a tree inside the block, then
atomics across the blocks, or partials and a fold, as :mod:`triton_launch` chooses.
"""

# The language inside `triton.jit` is not Python's: no type checker reads it.
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportRedeclaration=false

import triton
import triton.language as tl

from .triton_common import (
    GROUP,
    INFINITY,
    LANES,
    MOMENTS,
    PARTS,
    PLAIN,
    RANGE,
    clear_rest,
    fold,
    from_ordered,
    grid_of,
    load_pair,
    ordered,
    pair_of_moments,
    pair_of_range,
    store_pair,
    to_float,
)

GREATEST = tl.constexpr(0x7FFFFFFF)
_UNROLLED = tl.constexpr(8)


@triton.jit
def unit_statistics(
    x,
    numel,
    unit,
    length,
    units,
    STATISTICS: tl.constexpr,
    WIDE: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``(a, s, worst)`` of the units ``[BLOCK]`` of ``length`` consecutive elements.

    ``WHOLE`` units consist of whole groups, and the tensor may end before the last unit does.
    """
    there = unit < units
    start = unit * length
    first = to_float(tl.load(x + start, mask=there, other=0), DTYPE)
    lane = tl.arange(0, LANES)[None, :]
    s1 = tl.zeros((BLOCK, LANES), tl.float32)
    s2 = tl.zeros((BLOCK, LANES), tl.float32)
    least = tl.full((BLOCK, LANES), GREATEST, tl.int32)
    other = tl.full((BLOCK, LANES), GREATEST, tl.int32)
    for step in range(tl.cdiv(length, GROUP)):
        for part in tl.static_range(PARTS):
            column = step * GROUP + part * LANES + lane
            place = start[:, None] + column
            inside = place < numel if WHOLE else (column < length) & there[:, None]
            value = to_float(tl.load(x + place, mask=inside, other=0), DTYPE)
            if STATISTICS == RANGE:
                number = ordered(value)
                least = tl.minimum(least, tl.where(inside, number, GREATEST))
                other = tl.minimum(other, tl.where(inside, ~number, GREATEST))
            else:
                d = tl.where(inside, value - first[:, None], 0.0)
                s1 += d
                s2 += d * d
    if STATISTICS == RANGE:
        low, high = from_ordered(tl.min(least, 1)), from_ordered(~tl.min(other, 1))
        a, s, worst = pair_of_range(low, high, WIDE)
    else:
        count = tl.where(there, tl.minimum(length, numel - start), 1).to(tl.float32)
        s2 = fold(s2, BLOCK) if STATISTICS == MOMENTS else first
        a, s, worst = pair_of_moments(first, fold(s1, BLOCK), s2, count, STATISTICS, WIDE)
    return a, s, tl.where(there, worst, 0)


@triton.jit
def keep(flag, table, segments, shift, unit, units, a, s, worst, WIDE: tl.constexpr):
    """Write the statistics, and raise the flag where they are not finite."""
    tl.store(flag, 1, mask=tl.max(worst, 0) >= INFINITY)
    store_pair(table, segments, shift, unit, a, s, unit < units, WIDE)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        clear_rest(table, segments, shift, units, WIDE)


@triton.jit
def keep_grid(grids, unit, units, a, s, ORIGIN: tl.constexpr, DENSITY: tl.constexpr):
    """Leave the units' grids for :func:`triton_encode.encode_elements`."""
    origin, density = grid_of(a, s, ORIGIN, DENSITY)
    tl.store(grids + 2 * unit, origin, mask=unit < units)
    tl.store(grids + 2 * unit + 1, density, mask=unit < units)


@triton.jit(do_not_specialize=PLAIN)
def row_statistics(
    x,
    numel,
    rows,
    cols,
    flag,
    grids,
    table,
    segments,
    shift,
    STATISTICS: tl.constexpr,
    WIDE: tl.constexpr,
    ORIGIN: tl.constexpr,
    DENSITY: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics of ``BLOCK`` rows of any length; ``grids`` is ``fp32 [rows, 2]``."""
    unit = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, s, worst = unit_statistics(x, numel, unit, cols, rows, STATISTICS, WIDE, False, DTYPE, BLOCK)
    keep(flag, table, segments, shift, unit, rows, a, s, worst, WIDE)
    keep_grid(grids, unit, rows, a, s, ORIGIN, DENSITY)


@triton.jit(do_not_specialize=PLAIN)
def column_sums(
    x,
    numel,
    cols,
    block_rows,
    partial,
    TENSOR: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums over a block of rows, shifted by the unit's first element, and of their squares.

    ``partial`` is ``fp32 [blocks, 2, cols]``.
    """
    block = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < cols
    start = block.to(tl.int64) * block_rows * cols + column
    end = tl.minimum(numel, (block + 1).to(tl.int64) * block_rows * cols)
    first = to_float(tl.load(x) if TENSOR else tl.load(x + column, mask=there, other=0), DTYPE)
    s1 = tl.zeros((BLOCK,), tl.float32)
    s2 = tl.zeros((BLOCK,), tl.float32)
    for step in range(tl.cdiv(block_rows, _UNROLLED)):
        for part in tl.static_range(_UNROLLED):
            place = start + (step * _UNROLLED + part) * cols
            inside = there & (place < end)
            value = to_float(tl.load(x + place, mask=inside, other=0), DTYPE)
            d = tl.where(inside, value - first, 0.0)
            s1 += d
            s2 += d * d
    out = partial + block.to(tl.int64) * 2 * cols + column
    tl.store(out, s1, mask=there)
    tl.store(out + cols, s2, mask=there)


@triton.jit(do_not_specialize=PLAIN)
def column_ranges(
    x,
    numel,
    cols,
    block_rows,
    bounds,
    ATOMIC: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Least of :func:`ordered`, and of its complement, over a block of rows.

    ``bounds`` is ``int32 [blocks, 2, cols]``; ``[1, 2, cols]``, filled with the greatest integer,
    where ``ATOMIC``.
    """
    block = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < cols
    start = block.to(tl.int64) * block_rows * cols + column
    end = tl.minimum(numel, (block + 1).to(tl.int64) * block_rows * cols)
    least = tl.full((ROWS, BLOCK), GREATEST, tl.int32)
    other = tl.full((ROWS, BLOCK), GREATEST, tl.int32)
    for step in range(tl.cdiv(block_rows, ROWS)):
        place = start[None, :] + (step * ROWS + tl.arange(0, ROWS)[:, None]) * cols
        inside = there[None, :] & (place < end)
        number = ordered(to_float(tl.load(x + place, mask=inside, other=0), DTYPE))
        least = tl.minimum(least, tl.where(inside, number, GREATEST))
        other = tl.minimum(other, tl.where(inside, ~number, GREATEST))
    if ATOMIC:
        tl.atomic_min(bounds + column, tl.min(least, 0), mask=there, sem="relaxed")
        tl.atomic_min(bounds + cols + column, tl.min(other, 0), mask=there, sem="relaxed")
    else:
        out = bounds + block.to(tl.int64) * 2 * cols + column
        tl.store(out, tl.min(least, 0), mask=there)
        tl.store(out + cols, tl.min(other, 0), mask=there)


@triton.jit(do_not_specialize=PLAIN)
def finish_columns(
    x,
    partial,
    blocks,
    cols,
    count,
    flag,
    grids,
    table,
    segments,
    shift,
    units,
    STATISTICS: tl.constexpr,
    WIDE: tl.constexpr,
    TENSOR: tl.constexpr,
    ORIGIN: tl.constexpr,
    DENSITY: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fold the partials of ``blocks`` blocks in sequence, into statistics and grids.

    ``units`` is ``cols``, or 1 where ``TENSOR``: then the columns are folded too. ``count`` is the
    number of a unit's elements.
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = column < cols
    if STATISTICS == RANGE:
        least = tl.full((BLOCK,), GREATEST, tl.int32)
        other = tl.full((BLOCK,), GREATEST, tl.int32)
        for block in range(blocks):
            here = partial + block * 2 * cols + column
            least = tl.minimum(least, tl.load(here, mask=there, other=GREATEST))
            other = tl.minimum(other, tl.load(here + cols, mask=there, other=GREATEST))
        if TENSOR:
            least = tl.broadcast_to(tl.min(least, 0), (BLOCK,))
            other = tl.broadcast_to(tl.min(other, 0), (BLOCK,))
        a, s, worst = pair_of_range(from_ordered(least), from_ordered(~other), WIDE)
    else:
        s1 = tl.zeros((BLOCK,), tl.float32)
        s2 = tl.zeros((BLOCK,), tl.float32)
        for block in range(blocks):
            here = partial + block * 2 * cols + column
            s1 += tl.load(here, mask=there, other=0.0)
            s2 += tl.load(here + cols, mask=there, other=0.0)
        if TENSOR:
            s1 = tl.broadcast_to(fold(tl.reshape(s1, (1, LANES)), 1), (BLOCK,))
            s2 = tl.broadcast_to(fold(tl.reshape(s2, (1, LANES)), 1), (BLOCK,))
        first = to_float(tl.load(x + (column * 0 if TENSOR else column), mask=there), DTYPE)
        elements = (column * 0 + count).to(tl.float32)
        a, s, worst = pair_of_moments(first, s1, s2, elements, STATISTICS, WIDE)
    worst = tl.where(column < units, worst, 0)
    keep(flag, table, segments, shift, column, units, a, s, worst, WIDE)
    keep_grid(grids, column, units, a, s, ORIGIN, DENSITY)


@triton.jit(do_not_specialize=PLAIN)
def gather_pairs(pairs, units, table, segments, shift, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The statistics out of their pages, as ``fp32 [units, 2]``."""
    unit = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, s = load_pair(table, segments, shift, unit, unit < units, WIDE)
    tl.store(pairs + 2 * unit, a, mask=unit < units)
    tl.store(pairs + 2 * unit + 1, s, mask=unit < units)
