"""The plan, as a table for people."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .accounting import MemoryReport, SiteReport
from .tables import measured, megabytes, render_table

if TYPE_CHECKING:
    from .session import Session

SMALL_BYTES = 50_000
"""Consumers that read less than this share one row."""


def plan_table(session: Session) -> str:
    """What the plan gives to each consumer, dearest first; and what it predicts.

    One row for all sites that the same consumers read. Those of less than ``SMALL_BYTES`` in
    all are added up in the last row.
    """
    report = session.report()
    return render_table(
        "daf_hf: plan",
        ("read by", "codecs", "bits", "sites", "plain MB"),
        _rows(report.sites),
        3,
        _summary(report),
    )


def _rows(sites: Iterable[SiteReport]) -> list[tuple[str, ...]]:
    consumers: dict[str, list[SiteReport]] = defaultdict(list)
    for site in sites:
        consumers[site.consumer].append(site)
    small = [name for name, group in consumers.items() if _plain_bytes(group) < SMALL_BYTES]
    rest = [site for name in small for site in consumers.pop(name)]
    dearest_first = sorted(consumers.items(), key=lambda item: -_plain_bytes(item[1]))
    rows = [
        _row("not probed" if name == "unknown" else name, _codecs(group), group)
        for name, group in dearest_first
    ]
    if small:
        kinds = "1 kind" if len(small) == 1 else f"{len(small)} kinds"
        rows.append(_row(f"small ({kinds})", "various", rest))
    return rows


def _row(name: str, codecs: str, sites: list[SiteReport]) -> tuple[str, ...]:
    return (name, codecs, _bits(sites), str(len(sites)), megabytes(_plain_bytes(sites)))


def _plain_bytes(sites: Iterable[SiteReport]) -> int:
    return sum(site.plain_bytes for site in sites)


def _codecs(sites: Iterable[SiteReport]) -> str:
    """The codecs in use, that of most bytes first."""
    sizes: Counter[str] = Counter()
    for site in sites:
        sizes[site.codec] += site.plain_bytes
    return ", ".join(codec for codec, _ in sizes.most_common())


def _bits(sites: Iterable[SiteReport]) -> str:
    """The range of widths, and what else there is: ``exact``, ``derived``."""
    sites = list(sites)
    encoded = sorted({site.bits for site in sites if site.bits is not None})
    parts = ["-".join(str(bits) for bits in sorted({encoded[0], encoded[-1]}))] if encoded else []
    return ", ".join(parts + sorted({site.codec for site in sites if site.bits is None}))


def _summary(report: MemoryReport) -> str:
    return (
        f"budget {megabytes(report.budget_bytes)} MB, held {megabytes(report.held_bytes_peak)} MB, "
        f"plain {megabytes(report.plain_bytes)} MB, predicted gradient error "
        f"{measured(report.predicted_gradient_error)}"
    )
