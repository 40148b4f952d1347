"""Triton kernels that write codes.

``encode_units`` takes the statistics and writes the codes of whole groups in one kernel;
``encode_elements`` writes codes under statistics that :mod:`triton_statistics` has left, and
``encode_pair`` those of two-valued tensors.
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
    PAGE_GROUPS,
    PAGE_WORDS,
    PARTS,
    PLAIN,
    bits_of_element,
    code_of,
    grid_of,
    magnitude,
    page_address,
    plane_pointer,
    spread,
    to_float,
)
from .triton_statistics import GREATEST, keep, unit_statistics


@triton.jit
def store_planes(
    high, low, table, segments, shift, first_page, plane_pages, group, mask, BITS: tl.constexpr
):
    """Write the bytes ``[GROUPS, 32]`` of the first ``BITS`` planes; ``group`` is ``[GROUPS]``."""
    lane = tl.arange(0, LANES)
    for plane in tl.static_range(BITS):
        index = first_page + plane * plane_pages + group // PAGE_GROUPS
        start = plane_pointer(table, segments, shift, index, group % PAGE_GROUPS * LANES, mask)
        word = high if plane < 4 else low
        byte = (word >> (8 * (3 - plane % 4))).to(tl.uint8)
        tl.store(start[:, None] + lane[None, :], byte, mask=mask[:, None])


@triton.jit(do_not_specialize=PLAIN)
def encode_units(
    x,
    numel,
    units,
    unit_groups,
    flag,
    table,
    segments,
    shift,
    statistics_pages,
    plane_pages,
    lut,
    STATISTICS: tl.constexpr,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    ORIGIN: tl.constexpr,
    DENSITY: tl.constexpr,
    CELLS: tl.constexpr,
    LUT: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics and codes of ``BLOCK`` units of ``unit_groups`` groups each.

    There are programs enough for all groups of ``plane_pages``; those past the tensor are zero.
    """
    unit = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, s, worst = unit_statistics(
        x, numel, unit, unit_groups * GROUP, units, STATISTICS, WIDE, True, DTYPE, BLOCK
    )
    keep(flag, table, segments, shift, unit, units, a, s, worst, WIDE)
    if BITS > 0:
        origin, density = grid_of(a, s, ORIGIN, DENSITY)
        lane = tl.arange(0, LANES)[None, :]
        for step in range(unit_groups):
            group = unit * unit_groups + step
            high = tl.zeros((BLOCK, LANES), tl.int32)
            low = tl.zeros((BLOCK, LANES), tl.int32)
            for part in tl.static_range(PARTS):
                place = group[:, None] * GROUP + part * LANES + lane
                inside = place < numel
                value = to_float(tl.load(x + place, mask=inside, other=0), DTYPE)
                code = code_of(value, origin[:, None], density[:, None], lut, CELLS, LUT)
                code = tl.where(inside, code, 0)
                high |= spread(code >> 4, part)
                if BITS > 4:
                    low |= spread(code & 15, part)
            mask = group < plane_pages * PAGE_GROUPS
            store_planes(
                high, low, table, segments, shift, statistics_pages, plane_pages, group, mask, BITS
            )


@triton.jit(do_not_specialize=PLAIN)
def encode_elements(
    x,
    numel,
    cols,
    flag,
    grids,
    table,
    segments,
    shift,
    statistics_pages,
    plane_pages,
    lut,
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
    DENSITY: tl.constexpr,
    CELLS: tl.constexpr,
    LUT: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes of ``BLOCK`` groups, each element under its unit's ``grids`` ``fp32 [units, 2]``.

    ``UNIT`` is what an element's unit is: ``"row"``, ``"column"``, ``"tensor"``, or ``"none"``,
    where the grid is fixed and non-finite elements have not been looked for yet.
    """
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)[None, :]
    high = tl.zeros((BLOCK, LANES), tl.int32)
    low = tl.zeros((BLOCK, LANES), tl.int32)
    worst = tl.zeros((BLOCK, LANES), tl.int32)
    if UNIT == "tensor":
        origin, density = tl.load(grids), tl.load(grids + 1)
    elif UNIT == "none":
        origin, density = ORIGIN, DENSITY
    for part in tl.static_range(PARTS):
        place = group[:, None] * GROUP + part * LANES + lane
        inside = place < numel
        value = to_float(tl.load(x + place, mask=inside, other=0), DTYPE)
        if UNIT == "none":
            worst = tl.maximum(worst, magnitude(value))
        elif UNIT != "tensor":
            unit = unit_of(place, cols, UNIT)
            origin = tl.load(grids + 2 * unit, mask=inside, other=0.0)
            density = tl.load(grids + 2 * unit + 1, mask=inside, other=0.0)
        if BITS > 0:
            code = tl.where(inside, code_of(value, origin, density, lut, CELLS, LUT), 0)
            high |= spread(code >> 4, part)
            if BITS > 4:
                low |= spread(code & 15, part)
    if UNIT == "none":
        tl.store(flag, 1, mask=tl.max(worst) >= INFINITY)
    if BITS > 0:
        mask = group < plane_pages * PAGE_GROUPS
        store_planes(
            high, low, table, segments, shift, statistics_pages, plane_pages, group, mask, BITS
        )


@triton.jit
def unit_of(place, cols, UNIT: tl.constexpr):
    """The row or the column of an element."""
    row = place // cols
    return row if UNIT == "row" else place - row * cols


@triton.jit(do_not_specialize=PLAIN)
def encode_pair(
    x,
    numel,
    others,
    table,
    segments,
    shift,
    plane_pages,
    BLOCK: tl.constexpr,
):
    """The plane that tells which elements differ from the first, of ``x`` as integers.

    ``others`` ``int32 [2]``, the greatest integer twice, becomes the least of those that differ
    and the least of their complements.
    """
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)[None, :]
    first = tl.load(x)
    byte = tl.zeros((BLOCK, LANES), tl.int32)
    least = tl.full((BLOCK, LANES), GREATEST, tl.int32)
    other = tl.full((BLOCK, LANES), GREATEST, tl.int32)
    for part in tl.static_range(PARTS):
        place = group[:, None] * GROUP + part * LANES + lane
        value = tl.load(x + place, mask=place < numel, other=0)
        differs = (place < numel) & (value != first)
        byte |= differs.to(tl.int32) << part
        number = value.to(tl.int32)
        least = tl.minimum(least, tl.where(differs, number, GREATEST))
        other = tl.minimum(other, tl.where(differs, ~number, GREATEST))
    mask = group < plane_pages * PAGE_GROUPS
    store_planes(byte << 24, byte, table, segments, shift, 1, plane_pages, group, mask, 1)
    tl.atomic_min(others, tl.min(least), sem="relaxed")
    tl.atomic_min(others + 1, tl.min(other), sem="relaxed")


@triton.jit(do_not_specialize=PLAIN)
def finish_pair(x, flag, others, table, segments, shift, DTYPE: tl.constexpr):
    """Write the pair of values; raise the flag if there was a third."""
    first = tl.load(x)
    least, greatest = tl.load(others), ~tl.load(others + 1)
    tl.store(flag, 1, mask=least < greatest)
    second = tl.where(least <= greatest, least.to(x.dtype.element_ty), first)
    word = tl.arange(0, PAGE_WORDS)
    value = tl.where(word == 0, bits_of_element(first, DTYPE), bits_of_element(second, DTYPE))
    address = page_address(table, segments, shift, 0, True) + word * 4
    tl.store(address.to(tl.pointer_type(tl.int32)), tl.where(word < 2, value, 0))
