"""Encode and decode in plain torch: the oracle that every other backend is held to.

Written to be read, and to run on any device; speed is not its aim. Sums are taken in the order
that :mod:`daf_hf.kernels.format` fixes (lane ``j % 32`` in sequence, then the lanes folded in
halves; columns in blocks of rows), so that a vectorized backend can repeat them bit for bit.
"""

from __future__ import annotations

import math
from array import array

import torch
from torch import Tensor

from .format import (
    CHANNEL_BLOCK_ROWS,
    CHANNEL_BLOCKS_MAX,
    GROUP,
    LANES,
    PAGE_BYTES,
    SMALLEST_SCALE,
    Codebook,
    Granularity,
    Layout,
    PageSpace,
    Statistics,
)

name = "reference"


def encode(x: Tensor, layout: Layout, bits: int, table: array, space: PageSpace) -> bool:
    """Write ``x`` as ``bits`` planes and their statistics into pages.

    Args:
        x: flat contiguous tensor ``[layout.numel]``: fp32, bf16 or fp16, and for a ``PAIR``
            codebook also bool or uint8.
        layout: the codec and the sizes.
        bits: 0 to 8.
        table: ``array('i')`` with ``layout.pages(bits)`` page numbers.
        space: the memory of the pages.

    Returns:
        True when ``x`` is finite and representable (a ``PAIR`` codebook: two-valued). On False
        the pages hold nothing of use.
    """
    if not layout.numel:
        return True
    if layout.codebook.statistics is Statistics.PAIR:
        return _encode_pair(x, layout, table, space)
    values = x.float()
    a, s, finite = statistics(values, layout, bits)
    if not finite:
        return False
    if layout.units:
        _write(_statistics_bytes(a, s, layout.wide), table[: layout.statistics_pages], space)
    if bits:
        codes = quantize(values, expand(a, layout), expand(s, layout), layout.codebook)
        codes >>= 8 - bits
        _write_planes(codes, layout, bits, table, space)
    return True


def decode(out: Tensor, layout: Layout, bits: int, table: array, space: PageSpace) -> None:
    """Restore into the flat contiguous ``out`` ``[layout.numel]`` (any of encode's dtypes)."""
    if not layout.numel:
        return
    raw = _read(table[: layout.statistics_pages], space)
    codes = _read_planes(layout, bits, table, space)
    if layout.codebook.statistics is Statistics.PAIR:
        low, high = raw[:8].clone().view(torch.float32).unbind()
        out.copy_(torch.where(codes.bool(), high, low))
        return
    a, s = _statistics_from_bytes(raw, layout)
    values = layout.codebook.tables[bits].to(out.device)[codes.long()]
    out.copy_(expand(a, layout) + expand(s, layout) * values)


def quantize(values: Tensor, a: Tensor, s: Tensor, book: Codebook) -> Tensor:
    """The 8-bit codes ``uint8 [n]`` of fp32 ``values`` under statistics ``[n]`` (or ``[1]``)."""
    cells = cells_of(values, a, s, book)
    return cells.to(torch.uint8) if book.lut is None else book.lut.to(values.device)[cells.long()]


def cells_of(values: Tensor, a: Tensor, s: Tensor, book: Codebook) -> Tensor:
    """The cells ``int32 [n]`` of fp32 ``values`` under statistics ``[n]`` (or ``[1]``)."""
    origin = a + s * book.grid_origin
    density = torch.where(s > SMALLEST_SCALE, torch.full_like(s, book.grid_density) / s, 0.0)
    cell = (values - origin) * density
    return cell.nan_to_num(0.0).clamp(0.0, float(book.cells - 1)).to(torch.int32)


# Statistics -----------------------------------------------------------------------------------


def statistics(values: Tensor, layout: Layout, bits: int) -> tuple[Tensor, Tensor, bool]:
    """The pairs ``[units]`` of fp32 ``values`` as they are stored (rounded); whether all is finite.

    At 0 bits the second of a pair is zero.
    """
    if not bool(torch.isfinite(values).all()):
        return values.new_zeros(0), values.new_zeros(0), False
    kind = layout.codebook.statistics
    if kind is Statistics.NONE:
        return values.new_zeros(1), values.new_ones(1), True
    round_ = (lambda t: t) if layout.wide else (lambda t: t.to(torch.bfloat16).float())
    if bits == 0 or kind is Statistics.MOMENTS:
        mean, std = _moments(values, layout)
        a, s = round_(mean), (round_(std) if bits else torch.zeros_like(mean))
    else:
        low, high = _range(values, layout)
        a = round_(low) + 0.0  # a zero's sign would depend on the order of the reduction
        s = round_(high - a) + 0.0
    return a, s, bool(torch.isfinite(a).all() and torch.isfinite(s).all())


def _units(values: Tensor, layout: Layout) -> Tensor:
    """``values`` as ``[units, length]``; the last group is padded with its first element."""
    if layout.granularity is Granularity.TOKEN:
        return values.view(layout.rows, layout.cols)
    if layout.granularity is Granularity.TENSOR:
        return values.view(1, -1)
    padding = layout.groups * GROUP - layout.numel
    if padding:
        first = values[(layout.groups - 1) * GROUP].item()
        values = torch.nn.functional.pad(values, (0, padding), value=first)
    return values.view(layout.groups, GROUP)


def _range(values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    if layout.granularity is Granularity.CHANNEL:
        grid = values.view(layout.rows, layout.cols)
        return grid.amin(0), grid.amax(0)
    units = _units(values, layout)
    return units.amin(1), units.amax(1)


def _moments(values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each unit from sums shifted by the unit's first element."""
    if layout.granularity is Granularity.CHANNEL:
        grid = values.view(layout.rows, layout.cols)
        first, count = grid[0], values.new_tensor(float(layout.rows))
        d = grid - first
        s1, s2 = _column_sums(d), _column_sums(d * d)
    elif layout.granularity is Granularity.TENSOR:
        first, count = values[:1], values.new_tensor(float(layout.numel))
        d = torch.nn.functional.pad(values - first, (0, -layout.numel % LANES)).view(-1, LANES)
        s1, s2 = _fold(_column_sums(d)[None]), _fold(_column_sums(d * d)[None])
    else:
        units = _units(values, layout)
        first = units[:, 0]
        d = units - first[:, None]
        s1, s2 = _lane_sums(d), _lane_sums(d * d)
        count = torch.full_like(first, float(units.shape[1]))
        if layout.granularity is Granularity.GROUP:
            count[-1] = float(layout.numel - (layout.groups - 1) * GROUP)
    shift = s1 / count
    variance = (s2 / count - shift * shift).clamp_min(0.0)
    return first + shift, _square_root(variance)


def _square_root(x: Tensor) -> Tensor:
    """Correctly rounded, which fp32 ``sqrt`` is not on CPU where torch has MKL."""
    return x.double().sqrt().float() if x.device.type == "cpu" else x.sqrt()


def _lane_sums(units: Tensor) -> Tensor:
    """Sum of each row: lane ``j % 32`` in sequence, then the lanes folded in halves."""
    lanes = torch.nn.functional.pad(units, (0, -units.shape[1] % LANES))
    lanes = lanes.view(units.shape[0], -1, LANES)
    total = lanes[:, 0].clone()
    for step in range(1, lanes.shape[1]):
        total = total + lanes[:, step]
    return _fold(total)


def _fold(lanes: Tensor) -> Tensor:
    half = LANES // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    return lanes[:, 0]


def column_block_rows(rows: int) -> int:
    """Rows in a block of the columns' ordered sums."""
    return max(CHANNEL_BLOCK_ROWS, math.ceil(rows / CHANNEL_BLOCKS_MAX))


def _column_sums(grid: Tensor) -> Tensor:
    """Sum of each column: blocks of rows in sequence, then the blocks in sequence."""
    rows, cols = grid.shape
    block = column_block_rows(rows)
    grid = torch.nn.functional.pad(grid, (0, 0, 0, -rows % block)).view(-1, block, cols)
    partial = grid[:, 0].clone()
    for row in range(1, block):
        partial = partial + grid[:, row]
    total = partial[0].clone()
    for index in range(1, partial.shape[0]):
        total = total + partial[index]
    return total


def expand(unit_values: Tensor, layout: Layout) -> Tensor:
    """Per-unit values ``[units]`` as per-element values ``[n]`` (or ``[1]`` for one unit)."""
    if layout.units <= 1:
        return unit_values[:1]
    if layout.granularity is Granularity.TOKEN:
        return unit_values.repeat_interleave(layout.cols)
    if layout.granularity is Granularity.CHANNEL:
        return unit_values.repeat(layout.rows)
    return unit_values.repeat_interleave(GROUP)[: layout.numel]


def _statistics_bytes(a: Tensor, s: Tensor, wide: bool) -> Tensor:
    pairs = torch.stack((a, s), 1)
    return (pairs if wide else pairs.to(torch.bfloat16)).contiguous().view(torch.uint8).flatten()


def _statistics_from_bytes(raw: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    if not layout.units:
        return torch.zeros(1, device=raw.device), torch.ones(1, device=raw.device)
    size, dtype = (8, torch.float32) if layout.wide else (4, torch.bfloat16)
    pairs = raw[: layout.units * size].clone().view(dtype).view(-1, 2).float()
    return pairs[:, 0], pairs[:, 1]


def _encode_pair(x: Tensor, layout: Layout, table: array, space: PageSpace) -> bool:
    """Two values, told apart by their bits (so -inf and NaN are values like any other)."""
    raw = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
    second = raw != raw[0]
    index = int(second.to(torch.uint8).argmax())
    if not bool((raw[second] == raw[index]).all()):
        return False
    pair = torch.stack((x[0].float(), x[index].float()))
    _write(pair.view(torch.uint8), table[: layout.statistics_pages], space)
    _write_planes(second.to(torch.uint8), layout, 1, table, space)
    return True


# Planes and pages -----------------------------------------------------------------------------


def _write_planes(codes: Tensor, layout: Layout, bits: int, table: array, space: PageSpace) -> None:
    codes = torch.nn.functional.pad(codes, (0, layout.groups * GROUP - layout.numel))
    codes = codes.view(layout.groups, GROUP // LANES, LANES)
    weights = (1 << torch.arange(GROUP // LANES, device=codes.device))[None, :, None]
    for plane in range(bits):
        bit = (codes >> (bits - 1 - plane)) & 1
        start = layout.statistics_pages + plane * layout.plane_pages
        packed = (bit * weights).sum(1).to(torch.uint8)
        _write(packed.flatten(), table[start : start + layout.plane_pages], space)


def _read_planes(layout: Layout, bits: int, table: array, space: PageSpace) -> Tensor:
    """The codes ``uint8 [n]``."""
    device = _device(space)
    codes = torch.zeros(layout.groups, GROUP // LANES, LANES, dtype=torch.uint8, device=device)
    shifts = torch.arange(GROUP // LANES, device=device, dtype=torch.uint8)[None, :, None]
    for plane in range(bits):
        start = layout.statistics_pages + plane * layout.plane_pages
        packed = _read(table[start : start + layout.plane_pages], space)
        packed = packed[: layout.groups * LANES].view(layout.groups, 1, LANES)
        codes = (codes << 1) | ((packed >> shifts) & 1)
    return codes.flatten()[: layout.numel]


def _device(space: PageSpace) -> torch.device:
    return next((s.device for s in space.segments if s is not None), torch.device("cpu"))


def _locate(pages: array, space: PageSpace) -> tuple[Tensor, Tensor]:
    ids = torch.tensor(pages, dtype=torch.int64, device=_device(space))
    return ids // space.pages_per_segment, ids % space.pages_per_segment


def _segment(space: PageSpace, index: int) -> Tensor:
    segment = space.segments[index]
    assert segment is not None, f"page table points into segment {index}, which was given back"
    return segment.view(-1, PAGE_BYTES)


def _write(data: Tensor, pages: array, space: PageSpace) -> None:
    data = torch.nn.functional.pad(data, (0, len(pages) * PAGE_BYTES - data.numel()))
    data = data.view(-1, PAGE_BYTES)
    segments, offsets = _locate(pages, space)
    for index in segments.unique().tolist():
        here = segments == index
        _segment(space, index)[offsets[here]] = data[here]


def _read(pages: array, space: PageSpace) -> Tensor:
    segments, offsets = _locate(pages, space)
    out = torch.empty(len(pages), PAGE_BYTES, dtype=torch.uint8, device=segments.device)
    for index in segments.unique().tolist():
        here = segments == index
        out[here] = _segment(space, index)[offsets[here]]
    return out.flatten()
