"""What the host side of the Triton backend does about launches, codebooks and layouts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .device_pages import DevicePages
from .format import GROUP, Codebook, Granularity, Layout, Statistics
from .triton_launch import Shape

DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.uint8: 3,
    torch.bool: 4,
}
"""The kernels' numbers of the dtypes."""

Launch = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any], Shape], None]
"""Launches a kernel: kernel, grid, arguments, constants, shape."""


MAX_REGISTERS = 128
"""Left to itself, ptxas spills a few bytes now and then, to fit one more block on a processor."""


def compile_options(shape: Shape) -> dict[str, Any]:
    """How every kernel is compiled: with the arithmetic that the format fixes, nothing fused."""
    return {"num_warps": shape.warps, "enable_fp_fusion": False, "maxnreg": MAX_REGISTERS}


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple, constants: dict, shape: Shape
) -> None:
    """Launch ``kernel``."""
    kernel[grid](*arguments, **constants, **compile_options(shape))


class DeviceBook:
    """A codebook on a device.

    Attributes:
        lut: ``uint8 [cells]``, or of no use where the codebook has none.
        tables: for each width, the codes' values.
        affine: whether the values are the middles of equal bins of [0, 1].
        grid: constants of the kernels that leave grids of cells.
        cells: constants of the kernels that encode.
    """

    def __init__(self, codebook: Codebook, device: torch.device) -> None:
        lut = torch.empty(1, dtype=torch.uint8) if codebook.lut is None else codebook.lut
        self.lut = lut.to(device)
        self.tables = [table.to(device) for table in codebook.tables]
        self.affine = all(
            torch.equal(table, (torch.arange(1 << bits) + 0.5) / (1 << bits))
            for bits, table in enumerate(codebook.tables)
        )
        self.grid = {"ORIGIN": codebook.grid_origin, "DENSITY": codebook.grid_density}
        self.cells = {**self.grid, "CELLS": codebook.cells, "LUT": codebook.lut is not None}


def unit_groups(layout: Layout) -> int:
    """Groups that make up a unit of consecutive elements; 0 where units are not whole groups."""
    if layout.codebook.statistics is Statistics.NONE:
        return 0
    if layout.granularity is Granularity.GROUP:
        return 1
    if layout.granularity is Granularity.TOKEN and layout.cols % GROUP == 0:
        return layout.cols // GROUP
    return 0


def unit_kind(layout: Layout) -> str:
    """What an element's unit is for the kernel that decodes."""
    if not layout.units:
        return "none"
    if unit_groups(layout) or layout.granularity is Granularity.TENSOR:
        return "groups"
    return "row" if layout.granularity is Granularity.TOKEN else "column"


def elements(x: Tensor) -> Tensor:
    """What the kernels read and write elements as: bf16 as the integers of its bits."""
    return x.view(torch.int16) if x.dtype is torch.bfloat16 else x


def raw_bits(x: Tensor) -> Tensor:
    """Elements as integers of their bits."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def page_arguments(pages: DevicePages) -> tuple[Tensor, Tensor, int]:
    return pages.table, pages.segments, pages.shift


def cdiv(count: int, size: int) -> int:
    return -(-count // size)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on torch's current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
