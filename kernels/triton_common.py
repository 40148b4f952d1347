"""What the Triton kernels share: elements, bit planes, and the addresses of pages.

A group is handled as eight tiles ``[groups, 32]``, one for each bit of its bytes, and never as one
tile ``[groups, 8, 32]``: all that crosses the eight then stays within a thread, without shuffles,
and sums are taken in the order that the format fixes. Sums over lanes fold two halves at a time,
because a reduction over two elements has but one order.

All arithmetic is fp32, without fused multiply-add (the launch says so), with exactly rounded
division and square root. bf16 is handled as the integers of its bits.
"""

# The language inside `triton.jit` is not Python's: no type checker reads it.
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportRedeclaration=false

import triton
import triton.language as tl

from .format import GROUP as _GROUP
from .format import LANES as _LANES
from .format import PAGE_BYTES as _PAGE_BYTES
from .format import SMALLEST_SCALE as _SMALLEST_SCALE

GROUP = tl.constexpr(_GROUP)
LANES = tl.constexpr(_LANES)
PARTS = tl.constexpr(_GROUP // _LANES)
PAGE_BYTES = tl.constexpr(_PAGE_BYTES)
PAGE_GROUPS = tl.constexpr(_PAGE_BYTES // _LANES)
PAGE_WORDS = tl.constexpr(_PAGE_BYTES // 4)
SMALLEST_SCALE = tl.constexpr(_SMALLEST_SCALE)

FLOAT32 = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)
FLOAT16 = tl.constexpr(2)
UINT8 = tl.constexpr(3)
BOOL = tl.constexpr(4)

PLAIN = (
    *("units", "rows", "shift", "statistics_pages", "plane_pages", "blocks", "block_rows", "count"),
    *("table", "segments", "flag", "lut", "values"),
)
"""Arguments that a kernel is not compiled anew for when they are 1 or divisible by 16."""

RANGE = tl.constexpr(1)
MOMENTS = tl.constexpr(2)
MEAN = tl.constexpr(3)

INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SPREAD = tl.constexpr(0x00204081)
_GATHER = tl.constexpr(0x10204080)
_LOW_BITS = tl.constexpr(0x01010101)
_TWO_TO_23 = tl.constexpr(8388608.0)


# Elements -------------------------------------------------------------------------------------


@triton.jit
def to_float(raw, DTYPE: tl.constexpr):
    """Elements as fp32."""
    if DTYPE == BFLOAT16:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float32)


@triton.jit
def bfloat16_bits(value):
    """The bits of ``value`` rounded to bf16, ties to even; NaNs stay NaNs."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & _MAGNITUDE) > INFINITY, (bits >> 16) | 0x40, rounded)


@triton.jit
def from_float(value, DTYPE: tl.constexpr):
    """fp32 as elements."""
    if DTYPE == BFLOAT16:
        return bfloat16_bits(value).to(tl.int16)
    elif DTYPE == FLOAT16:
        return value.to(tl.float16)
    elif DTYPE == UINT8:
        return value.to(tl.int32).to(tl.uint8)
    elif DTYPE == BOOL:
        return (value != 0.0).to(tl.uint8)
    else:
        return value


@triton.jit
def magnitude(value):
    """An integer that grows with ``abs(value)``; finite values are below ``INFINITY``."""
    return value.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def ordered(value):
    """An integer that orders as the fp32 ``value`` does; its own inverse on the bits."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _MAGNITUDE)


@triton.jit
def from_ordered(number):
    """The fp32 value of :func:`ordered`."""
    return (number ^ ((number >> 31) & _MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def bits_of_element(raw, DTYPE: tl.constexpr):
    """The bits of the fp32 value of an element given by its bits; NaNs keep their payload."""
    if DTYPE == BFLOAT16:
        return raw.to(tl.int32) << 16
    elif DTYPE == FLOAT16:
        number = raw.to(tl.int32)
        not_finite = (number & 0x7FFF) >= 0x7C00
        finite = raw.to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
        wide = (number & -0x8000) << 16 | INFINITY | (number & 0x03FF) << 13
        return tl.where(not_finite, wide, finite)
    elif DTYPE == FLOAT32:
        return raw
    else:
        return raw.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def element_of_bits(bits, DTYPE: tl.constexpr):
    """The bits of the element that fp32 ``bits`` round to; NaNs stay NaNs."""
    value = bits.to(tl.float32, bitcast=True)
    if DTYPE == FLOAT16:
        number = value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        nan = (bits >> 16) & 0x8000 | 0x7E00 | (bits >> 13) & 0x03FF
        return tl.where((bits & _MAGNITUDE) > INFINITY, nan, number).to(tl.int16)
    elif DTYPE == FLOAT32:
        return bits
    else:
        return from_float(value, DTYPE)


# Statistics -----------------------------------------------------------------------------------


@triton.jit
def fold(lanes, ROWS: tl.constexpr):
    """Sum of the 32 lanes of ``[ROWS, 32]``, folded in halves."""
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 16)), 1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 8)), 1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 4)), 1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 2)), 1)
    return tl.sum(lanes, 1)


@triton.jit
def stored(value, WIDE: tl.constexpr):
    """``value`` as it is after it was stored."""
    if WIDE:
        return value
    else:
        return (bfloat16_bits(value) << 16).to(tl.float32, bitcast=True)


@triton.jit
def pair_of_moments(first, s1, s2, count, STATISTICS: tl.constexpr, WIDE: tl.constexpr):
    """``(a, s, worst)`` from sums shifted by ``first``; ``worst`` is the greatest magnitude."""
    shift = tl.div_rn(s1, count)
    mean = first + shift
    a = stored(mean, WIDE)
    worst = tl.maximum(magnitude(mean), magnitude(a))
    if STATISTICS == MEAN:
        return a, tl.zeros_like(a), worst
    else:
        variance = tl.div_rn(s2, count) - shift * shift
        std = tl.sqrt_rn(tl.where(variance < 0.0, 0.0, variance))
        s = stored(std, WIDE)
        return a, s, tl.maximum(worst, tl.maximum(magnitude(std), magnitude(s)))


@triton.jit
def pair_of_range(low, high, WIDE: tl.constexpr):
    """``(a, s, worst)`` from the least and the greatest; ``worst`` is the greatest magnitude."""
    a = stored(low, WIDE) + 0.0
    scale = high - a
    s = stored(scale, WIDE) + 0.0
    return a, s, tl.maximum(tl.maximum(magnitude(a), magnitude(scale)), magnitude(s))


@triton.jit
def grid_of(a, s, ORIGIN: tl.constexpr, DENSITY: tl.constexpr):
    """Where a unit's grid of cells starts, and its cells per unit of value."""
    constant = s <= SMALLEST_SCALE
    density = tl.where(constant, 0.0, tl.div_rn(DENSITY, tl.where(constant, 1.0, s)))
    return a + s * ORIGIN, density


@triton.jit
def code_of(value, origin, density, lut, CELLS: tl.constexpr, LUT: tl.constexpr):
    """The 8-bit code of fp32 ``value``."""
    cell = (value - origin) * density
    cell = tl.where(cell == cell, cell, 0.0)
    cell = tl.minimum(tl.maximum(cell, 0.0), CELLS - 1.0).to(tl.int32)
    if LUT:
        return tl.load(lut + cell).to(tl.int32)
    else:
        return cell


# Bit planes: two words of four bytes hold a lane's bytes of the planes 0 to 3 and 4 to 7 -------


@triton.jit
def spread(nibble, part):
    """Bit ``i`` of a nibble as bit ``part`` of byte ``i``."""
    return ((nibble * _SPREAD) & _LOW_BITS) << part


@triton.jit
def nibble_at(word, part):
    """The nibble whose bit ``i`` is bit ``part`` of byte ``i``."""
    return (((word >> part) & _LOW_BITS) * _GATHER >> 28) & 15


@triton.jit
def float_of_code(code):
    """Codes below 2**23 as fp32: the mantissa of 2**23, less 2**23."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - _TWO_TO_23


# Pages ----------------------------------------------------------------------------------------


@triton.jit
def page_address(table, segments, shift, index, mask):
    """Address of the page that entry ``index`` of the table names; 0 where not ``mask``."""
    page = tl.load(table + index, mask=mask, other=0)
    start = tl.load(segments + (page >> shift), mask=mask, other=0)
    return start + (page & ((1 << shift) - 1)).to(tl.int64) * PAGE_BYTES


@triton.jit
def plane_pointer(table, segments, shift, index, byte, mask):
    """Pointer to ``byte``, a multiple of 32, of the page that entry ``index`` names."""
    address = page_address(table, segments, shift, index, mask) + byte
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 32)


@triton.jit
def store_pair(table, segments, shift, unit, a, s, mask, WIDE: tl.constexpr):
    """Write the statistics of ``unit`` where they belong."""
    size: tl.constexpr = 8 if WIDE else 4
    place = unit * size
    address = page_address(table, segments, shift, place // PAGE_BYTES, mask)
    address += place % PAGE_BYTES
    if WIDE:
        tl.store(address.to(tl.pointer_type(tl.float32)), a, mask=mask)
        tl.store((address + 4).to(tl.pointer_type(tl.float32)), s, mask=mask)
    else:
        both = (bfloat16_bits(a) & 0xFFFF) | (bfloat16_bits(s) << 16)
        tl.store(address.to(tl.pointer_type(tl.int32)), both, mask=mask)


@triton.jit
def load_pair(table, segments, shift, unit, mask, WIDE: tl.constexpr):
    """The statistics of ``unit``."""
    size: tl.constexpr = 8 if WIDE else 4
    place = unit * size
    address = page_address(table, segments, shift, place // PAGE_BYTES, mask)
    address += place % PAGE_BYTES
    if WIDE:
        a = tl.load(address.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
        s = tl.load((address + 4).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    else:
        both = tl.load(address.to(tl.pointer_type(tl.int32)), mask=mask, other=0)
        a = (both << 16).to(tl.float32, bitcast=True)
        s = (both & -65536).to(tl.float32, bitcast=True)
    return a, s


@triton.jit
def clear_rest(table, segments, shift, units, WIDE: tl.constexpr):
    """Zero what the statistics of ``units`` leave of their last page."""
    words = units * (2 if WIDE else 1)
    last = (words - 1) // PAGE_WORDS
    address = page_address(table, segments, shift, last, last >= 0)
    word = tl.arange(0, PAGE_WORDS)
    mask = word >= words - last * PAGE_WORDS
    tl.store((address + word * 4).to(tl.pointer_type(tl.int32)), 0, mask=mask)
