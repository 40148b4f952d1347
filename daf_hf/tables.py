"""Tables of plain text, and how figures read in them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from io import StringIO

WIDTH = 100


def render_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], figures: int, below: str
) -> str:
    """A titled table with a line of text below it; no line ends in blanks.

    Lines are drawn with what standard output can show.

    Args:
        title: what stands above the table.
        columns: the headings.
        rows: the cells, as many a row as there are columns.
        figures: how many of the last columns hold figures, which are aligned to the right.
        below: what stands below the table.
    """
    from rich.console import Console  # here: training alone does not need it
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        is_figure = index >= len(columns) - figures
        table.add_column(name, justify="right" if is_figure else "left", no_wrap=is_figure)
    for row in rows:
        table.add_row(*row)
    out = _Text()
    console = Console(file=out, width=WIDTH, markup=False, highlight=False)
    console.print(table)
    console.print(below, soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


class _Text(StringIO):
    @property
    def encoding(self) -> str:
        """Where rich looks for what it may draw with."""
        return getattr(sys.stdout, "encoding", None) or "utf-8"


def megabytes(nbytes: float) -> str:
    """Bytes in MB of 10^6: one decimal, and below 1 MB three significant digits."""
    mb = nbytes / 1e6
    return f"{mb:.3g}" if mb < 1 else f"{mb:,.1f}"


def measured(value: float) -> str:
    """A figure in two significant digits; NaN is one that was not measured."""
    return "not measured" if math.isnan(value) else f"{value:.2g}"
