"""The Triton backend: encode and decode on CUDA devices.

Same contract and, bit for bit, same results as :mod:`daf_hf.kernels.reference`. With
``TRITON_INTERPRET=1`` (set before triton is imported) it serves CPU tensors, slowly, for tests.
This module is imported on demand: see :func:`daf_hf.kernels.get_backend`.
"""

from __future__ import annotations

import weakref
from array import array

import torch
from torch import Tensor

from . import triton_decode, triton_encode, triton_statistics
from .device_pages import DevicePages, upload
from .format import (
    GROUPS_PER_PAGE,
    LANES,
    MAX_BITS,
    Codebook,
    Granularity,
    Layout,
    PageSpace,
    Statistics,
)
from .reference import column_block_rows
from .triton_host import (
    DTYPES,
    DeviceBook,
    Launch,
    cdiv,
    elements,
    launch,
    on_device,
    page_arguments,
    raw_bits,
    unit_groups,
    unit_kind,
)
from .triton_launch import LaunchTable, Shape, launch_table

_FLOATS = 3  # dtype codes below this are floating point
_RANGE, _MEAN = 1, 3  # statistics that a kernel takes
_RANGE_ROWS = 16  # rows of a tile of column_ranges, and tiles of a block
_RANGE_TILES = 16
_GREATEST = 0x7FFFFFFF


class TritonBackend:
    """``encode`` and ``decode`` by Triton kernels. Made by :func:`daf_hf.kernels.get_backend`.

    Args:
        launch: what launches a kernel.
        table: the launch shapes; by default those of the tensor's device.
    """

    name = "triton"

    def __init__(self, launch: Launch = launch, table: LaunchTable | None = None) -> None:
        self._launch = launch
        self._table = table
        self._tables: dict[torch.device, LaunchTable] = {}
        self._books: weakref.WeakKeyDictionary[Codebook, dict[torch.device, DeviceBook]] = (
            weakref.WeakKeyDictionary()
        )

    def encode(self, x: Tensor, layout: Layout, bits: int, table: array, space: PageSpace) -> bool:
        """As :func:`daf_hf.kernels.reference.encode`. On a GPU the host waits for the answer.

        Raises:
            ValueError: ``x``, ``bits`` or ``table`` does not fit ``layout``.
        """
        _check(x, layout, bits, table)
        pair = layout.codebook.statistics is Statistics.PAIR
        if pair and bits != 1:
            raise ValueError(f"a two-valued tensor is encoded at 1 bit, not {bits}")
        if not pair and DTYPES[x.dtype] >= _FLOATS:
            raise ValueError(f"codebook {layout.codebook.name!r} cannot encode {x.dtype}")
        if not layout.numel:
            return True
        with on_device(x.device):
            pages = upload(table, layout.pages(bits), space, x.device)
            if pair:
                self._encode_pair(x, layout, pages)
            elif unit_groups(layout):
                self._encode_units(x, layout, bits, pages)
            else:
                self._encode_elements(x, layout, bits, pages)
            return not pages.flag.item()

    def decode(
        self, out: Tensor, layout: Layout, bits: int, table: array, space: PageSpace
    ) -> None:
        """As :func:`daf_hf.kernels.reference.decode`. The host does not wait.

        Raises:
            ValueError: ``out``, ``bits`` or ``table`` does not fit ``layout``.
        """
        _check(out, layout, bits, table)
        if not layout.numel:
            return
        with on_device(out.device):
            pages = upload(table, layout.pages(bits), space, out.device)
            if layout.codebook.statistics is Statistics.PAIR:
                self._decode_pair(out, layout, bits, pages)
            else:
                self._decode_elements(out, layout, bits, pages)

    # Encode ------------------------------------------------------------------------------------

    def _encode_units(self, x: Tensor, layout: Layout, bits: int, pages: DevicePages) -> None:
        book = self._book(layout, x.device)
        groups = unit_groups(layout)
        shape = self._shape("encode_groups" if groups == 1 else "encode_rows", x.device)
        self._launch(
            triton_encode.encode_units,
            (cdiv(layout.plane_pages * GROUPS_PER_PAGE, groups * shape.block),),
            (
                *(elements(x), layout.numel, layout.units, groups, pages.flag),
                *page_arguments(pages),
                *(layout.statistics_pages, layout.plane_pages, book.lut),
            ),
            {
                "STATISTICS": _statistics(layout, bits),
                "BITS": bits,
                "WIDE": layout.wide,
                **book.cells,
                "DTYPE": DTYPES[x.dtype],
                "BLOCK": shape.block,
            },
            shape,
        )

    def _encode_elements(self, x: Tensor, layout: Layout, bits: int, pages: DevicePages) -> None:
        book = self._book(layout, x.device)
        grids = torch.empty(max(layout.units, 1) * 2, dtype=torch.float32, device=x.device)
        if layout.granularity is Granularity.TOKEN and layout.units:
            self._row_statistics(x, layout, bits, pages, grids)
        elif layout.units:
            self._column_statistics(x, layout, bits, pages, grids)
        if not bits and layout.units:
            return
        unit = unit_kind(layout) if layout.units != 1 else "tensor"
        cols = layout.cols if unit in ("row", "column") else 1
        shape = self._shape("encode_elements", x.device)
        self._launch(
            triton_encode.encode_elements,
            (cdiv(layout.plane_pages * GROUPS_PER_PAGE, shape.block),),
            (
                *(elements(x), layout.numel, cols, pages.flag, grids),
                *page_arguments(pages),
                *(layout.statistics_pages, layout.plane_pages, book.lut),
            ),
            {
                "UNIT": unit,
                "BITS": bits,
                **book.cells,
                "DTYPE": DTYPES[x.dtype],
                "BLOCK": shape.block,
            },
            shape,
        )

    def _row_statistics(
        self, x: Tensor, layout: Layout, bits: int, pages: DevicePages, grids: Tensor
    ) -> None:
        shape = self._shape("row_statistics", x.device)
        self._launch(
            triton_statistics.row_statistics,
            (cdiv(layout.rows, shape.block),),
            (
                *(elements(x), layout.numel, layout.rows, layout.cols, pages.flag, grids),
                *page_arguments(pages),
            ),
            {
                "STATISTICS": _statistics(layout, bits),
                "WIDE": layout.wide,
                **self._book(layout, x.device).grid,
                "DTYPE": DTYPES[x.dtype],
                "BLOCK": shape.block,
            },
            shape,
        )

    def _column_statistics(
        self, x: Tensor, layout: Layout, bits: int, pages: DevicePages, grids: Tensor
    ) -> None:
        """Partials of blocks of rows, then their fold; a tensor is 32 columns that are folded."""
        tensor = layout.granularity is Granularity.TENSOR
        cols = LANES if tensor else layout.cols
        rows = cdiv(layout.numel, cols)
        statistics = _statistics(layout, bits)
        reduce = self._column_ranges if statistics == _RANGE else self._column_sums
        partial, blocks = reduce(x, rows, cols, tensor)
        shape = Shape(LANES, 1) if tensor else self._shape("finish_columns", x.device)
        self._launch(
            triton_statistics.finish_columns,
            (cdiv(cols, shape.block),),
            (
                *(elements(x), partial, blocks, cols, layout.numel if tensor else rows),
                *(pages.flag, grids, *page_arguments(pages), layout.units),
            ),
            {
                "STATISTICS": statistics,
                "WIDE": layout.wide,
                "TENSOR": tensor,
                **self._book(layout, x.device).grid,
                "DTYPE": DTYPES[x.dtype],
                "BLOCK": shape.block,
            },
            shape,
        )

    def _column_sums(self, x: Tensor, rows: int, cols: int, tensor: bool) -> tuple[Tensor, int]:
        """``fp32 [blocks, 2, cols]`` and the number of blocks, which the format fixes."""
        block_rows = column_block_rows(rows)
        blocks = cdiv(rows, block_rows)
        partial = torch.empty(blocks * 2 * cols, dtype=torch.float32, device=x.device)
        shape = Shape(LANES, 1) if tensor else self._shape("column_sums", x.device)
        self._launch(
            triton_statistics.column_sums,
            (blocks, cdiv(cols, shape.block)),
            (elements(x), x.numel(), cols, block_rows, partial),
            {"TENSOR": tensor, "DTYPE": DTYPES[x.dtype], "BLOCK": shape.block},
            shape,
        )
        return partial, blocks

    def _column_ranges(self, x: Tensor, rows: int, cols: int, tensor: bool) -> tuple[Tensor, int]:
        """``int32 [blocks, 2, cols]`` and the number of blocks that are left to fold."""
        block_rows = _RANGE_ROWS * _RANGE_TILES
        blocks = cdiv(rows, block_rows)
        atomic = blocks > self._launch_table(x.device).atomic_above
        size = (1 if atomic else blocks) * 2 * cols
        bounds = torch.empty(size, dtype=torch.int32, device=x.device)
        if atomic:
            bounds.fill_(_GREATEST)
        shape = self._shape("column_ranges", x.device)
        shape = Shape(LANES, shape.warps) if tensor else shape
        self._launch(
            triton_statistics.column_ranges,
            (blocks, cdiv(cols, shape.block)),
            (elements(x), x.numel(), cols, block_rows, bounds),
            {
                "ATOMIC": atomic,
                "DTYPE": DTYPES[x.dtype],
                "ROWS": _RANGE_ROWS,
                "BLOCK": shape.block,
            },
            shape,
        )
        return bounds, 1 if atomic else blocks

    def _encode_pair(self, x: Tensor, layout: Layout, pages: DevicePages) -> None:
        raw = raw_bits(x)
        others = torch.full((2,), _GREATEST, dtype=torch.int32, device=x.device)
        shape = self._shape("encode_pair", x.device)
        self._launch(
            triton_encode.encode_pair,
            (cdiv(layout.plane_pages * GROUPS_PER_PAGE, shape.block),),
            (raw, layout.numel, others, *page_arguments(pages), layout.plane_pages),
            {"BLOCK": shape.block},
            shape,
        )
        self._launch(
            triton_encode.finish_pair,
            (1,),
            (raw, pages.flag, others, *page_arguments(pages)),
            {"DTYPE": DTYPES[x.dtype]},
            self._shape("finish_pair", x.device),
        )

    # Decode ------------------------------------------------------------------------------------

    def _decode_elements(self, out: Tensor, layout: Layout, bits: int, pages: DevicePages) -> None:
        book, unit = self._book(layout, out.device), unit_kind(layout)
        pairs, cols = book.tables[bits], 1
        groups = unit_groups(layout) or layout.groups if unit == "groups" else 1
        if unit in ("row", "column"):
            cols = layout.cols
            pairs = torch.empty(layout.units * 2, dtype=torch.float32, device=out.device)
            shape = self._shape("gather_pairs", out.device)
            self._launch(
                triton_statistics.gather_pairs,
                (cdiv(layout.units, shape.block),),
                (pairs, layout.units, *page_arguments(pages)),
                {"WIDE": layout.wide, "BLOCK": shape.block},
                shape,
            )
        shape = self._shape("decode_elements", out.device)
        self._launch(
            triton_decode.decode_elements,
            (cdiv(layout.groups, shape.block),),
            (
                *(elements(out), layout.numel, cols, groups),
                *(pairs, *page_arguments(pages), layout.statistics_pages, layout.plane_pages),
                book.tables[bits],
            ),
            {
                "UNIT": unit,
                "BITS": bits,
                "WIDE": layout.wide,
                "AFFINE": book.affine,
                "DTYPE": DTYPES[out.dtype],
                "BLOCK": shape.block,
            },
            shape,
        )

    def _decode_pair(self, out: Tensor, layout: Layout, bits: int, pages: DevicePages) -> None:
        shape = self._shape("decode_pair", out.device)
        self._launch(
            triton_decode.decode_pair,
            (cdiv(layout.groups, shape.block),),
            (raw_bits(out), layout.numel, *page_arguments(pages), layout.plane_pages),
            {"BITS": bits, "DTYPE": DTYPES[out.dtype], "BLOCK": shape.block},
            shape,
        )

    # What is kept for a device -----------------------------------------------------------------

    def _launch_table(self, device: torch.device) -> LaunchTable:
        if self._table is not None:
            return self._table
        table = self._tables.get(device)
        if table is None:
            capability = None
            if device.type == "cuda":
                major, minor = torch.cuda.get_device_capability(device)
                capability = 10 * major + minor
            table = self._tables[device] = launch_table(capability)
        return table

    def _shape(self, kernel: str, device: torch.device) -> Shape:
        return self._launch_table(device)[kernel]

    def _book(self, layout: Layout, device: torch.device) -> DeviceBook:
        books = self._books.setdefault(layout.codebook, {})
        book = books.get(device)
        if book is None:
            book = books[device] = DeviceBook(layout.codebook, device)
        return book


def _statistics(layout: Layout, bits: int) -> int:
    return int(layout.codebook.statistics) if bits else _MEAN


def _check(x: Tensor, layout: Layout, bits: int, table: array) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"dtype {x.dtype} is not supported: use one of {list(DTYPES)}")
    if x.numel() != layout.numel or not x.is_contiguous():
        raise ValueError(
            f"expected a contiguous tensor of {layout.numel} elements, "
            f"got shape {tuple(x.shape)}, strides {x.stride()}"
        )
    if not 0 <= bits <= MAX_BITS or len(table) < layout.pages(bits):
        raise ValueError(
            f"{bits} bits need 0 <= bits <= {MAX_BITS} and {layout.pages(bits)} pages, "
            f"got a table of {len(table)}"
        )
