"""The plan, as a table for people."""

from __future__ import annotations

from collections import defaultdict
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .session import Session


def plan_table(session: Session) -> str:
    """Sites grouped by consumer, codec and width, dearest first; and what the plan predicts."""
    report = session.report()
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for site in report.sites:
        bits = "exact" if site.bits is None else str(site.bits)
        groups[site.consumer, site.codec, bits].append(site.plain_bytes)
    table = Table(title="daf_hf: plan", title_justify="left")
    for name, right in (
        ("read by", False),
        ("codec", False),
        ("bits", True),
        ("sites", True),
        ("plain MB", True),
    ):
        table.add_column(
            name, justify="right" if right else "left", no_wrap=not right and name != "read by"
        )
    for (consumer, codec, bits), sizes in sorted(groups.items(), key=lambda item: -sum(item[1])):
        table.add_row(consumer, codec, bits, str(len(sizes)), f"{sum(sizes) / 1e6:,.1f}")
    out = StringIO()
    console = Console(file=out, width=100)
    console.print(table)
    console.print(
        f"budget {report.budget_bytes / 1e6:,.1f} MB, held {report.held_bytes_peak / 1e6:,.1f} MB, "
        f"plain {report.plain_bytes / 1e6:,.1f} MB, predicted gradient error "
        f"{report.predicted_gradient_error:.3f}",
        highlight=False,
        soft_wrap=True,
    )
    return out.getvalue().rstrip()
