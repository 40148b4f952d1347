"""Launch shapes of the Triton kernels: one table for each compute capability, and a default.

No entry has been tuned on hardware yet. ``benchmarks/triton_tune.py`` measures on the GPU at hand
and writes a file that ``DAF_HF_TRITON_LAUNCH`` can name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

LAUNCH_VARIABLE = "DAF_HF_TRITON_LAUNCH"
"""Environment variable: a JSON file with tables that precede those of ``TABLES``."""


class Shape(NamedTuple):
    """How one kernel is launched.

    Attributes:
        block: groups, units, rows or columns that a program handles; a power of two.
        warps: warps of a program.
    """

    block: int
    warps: int


@dataclass(frozen=True)
class LaunchTable:
    """The launch shapes of a compute capability.

    Attributes:
        shapes: the shape of each kernel.
        atomic_above: a range is reduced across more blocks than this by atomics, across fewer by
            a second stage.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    atomic_above: int = 32

    def __getitem__(self, kernel: str) -> Shape:
        return self.shapes.get(kernel) or DEFAULT_SHAPES[kernel]


DEFAULT_SHAPES: Mapping[str, Shape] = {
    "encode_groups": Shape(16, 4),
    "encode_rows": Shape(4, 2),
    "encode_elements": Shape(16, 4),
    "encode_pair": Shape(32, 8),
    "finish_pair": Shape(1, 1),
    "row_statistics": Shape(16, 4),
    "column_sums": Shape(128, 4),
    "column_ranges": Shape(64, 4),
    "finish_columns": Shape(128, 4),
    "gather_pairs": Shape(256, 4),
    "decode_elements": Shape(32, 8),
    "decode_pair": Shape(32, 8),
}
"""Shapes that compile without spills on sm_75, 80, 87, 90 and 120; not tuned on hardware."""

TABLES: Mapping[int, LaunchTable] = {}
"""Tables tuned on hardware, by compute capability (``80`` for 8.0)."""


def launch_table(capability: int | None) -> LaunchTable:
    """The table of ``capability``; the default where it has none.

    Raises:
        ValueError: the file that ``DAF_HF_TRITON_LAUNCH`` names is not one of tables.
    """
    tables = {**TABLES, **_tables_of_file(os.environ.get(LAUNCH_VARIABLE, ""))}
    return tables.get(capability or 0, LaunchTable())


def write_table(path: Path, capability: int, table: LaunchTable) -> None:
    """Put the table of ``capability`` into the file ``path``, next to those of others."""
    tables = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    tables[str(capability)] = {"shapes": table.shapes, "atomic_above": table.atomic_above}
    path.write_text(json.dumps(tables, indent=2) + "\n", encoding="utf-8")


@cache
def _tables_of_file(path: str) -> Mapping[int, LaunchTable]:
    if not path:
        return {}
    try:
        return {
            int(capability): LaunchTable(
                {name: _shape(name, value) for name, value in entry["shapes"].items()},
                int(entry["atomic_above"]),
            )
            for capability, entry in json.loads(Path(path).read_text(encoding="utf-8")).items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{LAUNCH_VARIABLE}={path!r} is not a table of launch shapes ({error!r}): write one "
            "with benchmarks/triton_tune.py, or unset it"
        ) from error


def _shape(name: str, value: list[int]) -> Shape:
    block, warps = value
    if name not in DEFAULT_SHAPES or any(n < 1 or n & (n - 1) for n in (block, warps)):
        raise ValueError(f"{name}: {value}: known kernels and powers of two only")
    return Shape(block, warps)
