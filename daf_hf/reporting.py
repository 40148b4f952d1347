"""The report of what a model under compression has held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from .accounting import MemoryReport, ResidentPeak, SiteReport
from .saved_tensors import Compressor
from .tables import measured, megabytes, render_table


def memory_report(
    compressor: Compressor, error: float, resident: ResidentPeak, optimizer: Any = None
) -> MemoryReport:
    """What was held so far.

    Args:
        compressor: of the model.
        error: the gradient's predicted relative error.
        resident: of the process.
        optimizer: a :class:`torch.optim.Optimizer` or what accelerate wraps one in, for the bytes
            of its state.
    """
    compressor.held_bytes()  # what waits is packed and counted
    ledger, model = compressor.ledger, compressor.model
    parameters = list(model.parameters())
    return MemoryReport(
        budget_bytes=compressor.arena.limit_bytes,
        budget_bytes_at_peak=ledger.peak.budget,
        held_bytes_peak=ledger.peak.held,
        stored_bytes_peak=ledger.peak.stored,
        exact_bytes_peak=ledger.peak.exact,
        plain_bytes=ledger.plain_peak,
        mean_bits=ledger.peak.mean_bits,
        predicted_gradient_error=error,
        overhead_seconds={
            "kernels": ledger.kernel_seconds,
            "hooks": ledger.hook_seconds,
            "planning": ledger.planning_seconds,
        },
        weight_bytes=sum(t.nbytes for t in (*parameters, *model.buffers())),
        gradient_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
        optimizer_bytes=_optimizer_bytes(optimizer),
        peak_rss_bytes=resident.sample(),
        demotions=compressor.arena.demotions,
        counts=dict(ledger.counts),
        sites=tuple(_site_reports(compressor)),
    )


def ranks_table(reports: Sequence[MemoryReport]) -> str:
    """What each rank has held: one row a rank, in MB of 10^6 bytes."""
    return render_table(
        "daf_hf: memory by rank",
        ("rank", "budget MB", "held MB", "plain MB", "ratio", "bits", "error", "RSS MB"),
        [
            (
                str(rank),
                megabytes(report.budget_bytes),
                megabytes(report.held_bytes_peak),
                megabytes(report.plain_bytes),
                f"{report.ratio:.1f}",
                f"{report.mean_bits:.2f}",
                measured(report.predicted_gradient_error),
                megabytes(report.peak_rss_bytes),
            )
            for rank, report in enumerate(reports)
        ],
        7,
        "one plan for all; each rank has its own budget and arena",
    )


def _site_reports(compressor: Compressor) -> Iterator[SiteReport]:
    for site in compressor.tracker.sites.values():
        codec, bits = site.placed
        yield SiteReport(
            site.name,
            site.consumer,
            tuple(site.shape),
            str(site.dtype).removeprefix("torch."),
            site.nbytes,
            str(codec),
            bits,
            site.importance,
        )


def _optimizer_bytes(optimizer: Any) -> int:
    total = 0
    while optimizer is not None and hasattr(optimizer, "optimizer"):  # accelerate wraps it
        optimizer = optimizer.optimizer
    if optimizer is not None:
        for state in optimizer.state.values():
            with suppress(AttributeError):
                total += sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor))
    return total
