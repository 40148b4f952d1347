"""The Triton kernels that restore values."""

# The language inside `triton.jit` is not Python's: no type checker reads it.
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportRedeclaration=false

import triton
import triton.language as tl

from .triton_common import (
    GROUP,
    LANES,
    PAGE_GROUPS,
    PARTS,
    PLAIN,
    element_of_bits,
    float_of_code,
    from_float,
    load_pair,
    nibble_at,
    page_address,
    plane_pointer,
)
from .triton_encode import unit_of


@triton.jit
def load_planes(
    table,
    segments,
    shift,
    first_page,
    plane_pages,
    group,
    mask,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Two words ``[BLOCK, 32]`` with the bytes of the first ``BITS`` planes."""
    lane = tl.arange(0, LANES)[None, :]
    high = tl.zeros((BLOCK, LANES), tl.int32)
    low = tl.zeros((BLOCK, LANES), tl.int32)
    for plane in tl.static_range(BITS):
        index = first_page + plane * plane_pages + group // PAGE_GROUPS
        start = plane_pointer(table, segments, shift, index, group % PAGE_GROUPS * LANES, mask)
        byte = tl.load(start[:, None] + lane, mask=mask[:, None], other=0).to(tl.int32)
        if plane < 4:
            high |= byte << (8 * (3 - plane))
        else:
            low |= byte << (8 * (7 - plane))
    return high, low


@triton.jit(do_not_specialize=PLAIN)
def decode_elements(
    out,
    numel,
    cols,
    unit_groups,
    pairs,
    table,
    segments,
    shift,
    statistics_pages,
    plane_pages,
    values,
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Values of ``BLOCK`` groups.

    ``UNIT`` is what an element's unit is: ``"groups"``, of which ``unit_groups`` make up a unit;
    ``"row"`` or ``"column"``, whose statistics are in ``pairs`` ``fp32 [units, 2]``; or ``"none"``.
    ``values`` are the codes' values; where they are the middles of equal bins, it is ``AFFINE``.
    """
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = group * GROUP < numel
    high, low = load_planes(
        table, segments, shift, statistics_pages, plane_pages, group, there, BITS, BLOCK
    )
    a = tl.zeros((BLOCK, 1), tl.float32)
    s = tl.full((BLOCK, 1), 1.0, tl.float32)
    if UNIT == "groups":
        a, s = load_pair(table, segments, shift, group // unit_groups, there, WIDE)
        a, s = a[:, None], s[:, None]
    lane = tl.arange(0, LANES)[None, :]
    for part in tl.static_range(PARTS):
        place = group[:, None] * GROUP + part * LANES + lane
        inside = place < numel
        code = nibble_at(high, part) >> (4 - BITS if BITS < 4 else 0)
        if BITS > 4:
            code = (code << 4 | nibble_at(low, part)) >> (8 - BITS)
        if AFFINE:
            value = (float_of_code(code) + 0.5) * (1.0 / (1 << BITS))
        else:
            value = tl.load(values + code)
        if UNIT == "row" or UNIT == "column":
            unit = unit_of(place, cols, UNIT)
            here_a = tl.load(pairs + 2 * unit, mask=inside, other=0.0)
            here_s = tl.load(pairs + 2 * unit + 1, mask=inside, other=0.0)
            value = here_a + here_s * value
        else:
            value = a + s * value
        tl.store(out + place, from_float(value, DTYPE), mask=inside)


@triton.jit(do_not_specialize=PLAIN)
def decode_pair(
    out,
    numel,
    table,
    segments,
    shift,
    plane_pages,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The two values of ``BLOCK`` groups, as integers of the elements' bits."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = group * GROUP < numel
    address = page_address(table, segments, shift, 0, True)
    first = element_of_bits(tl.load(address.to(tl.pointer_type(tl.int32))), DTYPE)
    second = element_of_bits(tl.load((address + 4).to(tl.pointer_type(tl.int32))), DTYPE)
    high, _ = load_planes(table, segments, shift, 1, plane_pages, group, there, BITS, BLOCK)
    lane = tl.arange(0, LANES)[None, :]
    for part in tl.static_range(PARTS):
        place = group[:, None] * GROUP + part * LANES + lane
        value = tl.where(((high >> (24 + part)) & 1) != 0, second, first)
        tl.store(out + place, value, mask=place < numel)
