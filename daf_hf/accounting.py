"""Who holds which bytes, and the report of it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .tables import measured, megabytes, render_table


class _Holding:
    """One storage that saved tensors refer to."""

    __slots__ = ("alive", "exact", "nbytes", "saved")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # While the weak reference lives, no other storage can have the same address.
        self.alive = StorageWeakRef(storage)
        self.nbytes = storage.nbytes()
        self.saved = 0
        self.exact = 0


@dataclass
class Peak:
    """What was held at the worst moment.

    Attributes:
        held, stored, exact: bytes; held = stored + exact.
        elements, bits: of lossy and binary storage, for the mean width.
        budget: in force at that moment.
    """

    held: int = 0
    stored: int = 0
    exact: int = 0
    elements: int = 0
    bits: int = 0
    budget: float | None = None

    @property
    def mean_bits(self) -> float:
        """Mean bit width of the encoded elements (0 when there are none)."""
        return self.bits / self.elements if self.elements else 0.0


class Ledger:
    """Counts unique bytes: what plain training would hold, and what is held exactly.

    Attributes:
        plain: unique bytes of the storages that live saved tensors refer to: what plain
            training would hold at this moment, parameters and buffers left out.
        plain_peak: the most that ``plain`` has been.
        peak: at the worst moment since the start.
        step_peak: at the worst moment since the last :meth:`start_step`.
        pass_peak: bytes held at the worst moment since a forward pass began, without those of
            elements that waited to be packed.
        kernel_seconds, hook_seconds, planning_seconds: time spent (hooks without kernels).
        counts: events by name, as :class:`MemoryReport` lists them.
    """

    def __init__(self) -> None:
        self.plain = 0
        self.plain_peak = 0
        self.step_plain_peak = 0
        self.peak = Peak()
        self.step_peak = Peak()
        self.pass_peak = 0
        self.kernel_seconds = 0.0
        self.hook_seconds = 0.0
        self.planning_seconds = 0.0
        self.counts: dict[str, int] = {}
        self._holdings: dict[int, _Holding] = {}

    def count(self, event: str) -> None:
        """Count an event."""
        self.counts[event] = self.counts.get(event, 0) + 1

    def save(self, cdata: int, storage: torch.UntypedStorage) -> bool:
        """A saved tensor refers to this storage; True when it is the first one to."""
        holding = self._holdings.get(cdata)
        if holding is None:
            holding = self._holdings[cdata] = _Holding(storage)
        if not holding.saved:
            self.plain += holding.nbytes
            self.plain_peak = max(self.plain_peak, self.plain)
            self.step_plain_peak = max(self.step_plain_peak, self.plain)
        holding.saved += 1
        return holding.saved == 1

    def unsave(self, cdata: int) -> None:
        """A saved tensor is gone."""
        holding = self._holdings[cdata]
        holding.saved -= 1
        if not holding.saved:
            self.plain -= holding.nbytes
            self._forget(cdata, holding)

    def _forget(self, cdata: int, holding: _Holding) -> None:
        if not holding.saved and not holding.exact:
            del self._holdings[cdata]

    def storage_bytes(self, cdata: int) -> int:
        """Bytes of a storage that a saved tensor refers to."""
        return self._holdings[cdata].nbytes

    def hold_exactly(self, cdata: int) -> int:
        """A saved tensor keeps this storage itself; the bytes that this adds."""
        holding = self._holdings[cdata]
        holding.exact += 1
        return holding.nbytes if holding.exact == 1 else 0

    def is_held_exactly(self, cdata: int) -> bool:
        """Whether the storage is kept already."""
        holding = self._holdings.get(cdata)
        return holding is not None and holding.exact > 0

    def release_exactly(self, cdata: int) -> int:
        """Undo :meth:`hold_exactly`; the bytes that this frees."""
        holding = self._holdings[cdata]
        holding.exact -= 1
        freed = 0 if holding.exact else holding.nbytes
        self._forget(cdata, holding)
        return freed

    def sole_bytes(self, cdata: int) -> int:
        """What :meth:`release_exactly` would free: nothing while others hold the storage too."""
        holding = self._holdings[cdata]
        return holding.nbytes if holding.exact == 1 else 0

    def observe(
        self,
        held: int,
        exact: int,
        elements: int,
        bits: int,
        waiting: int = 0,
        budget: float = math.inf,
    ) -> None:
        """Note a moment; keeps the worst ones. ``waiting``: of ``exact``, what is soon packed."""
        self.pass_peak = max(self.pass_peak, held - waiting)
        if held > self.step_peak.held:
            self.step_peak = Peak(held, held - exact, exact, elements, bits, budget)
            if held > self.peak.held:
                self.peak = self.step_peak

    def start_step(self) -> None:
        """Begin a step's own peaks."""
        self.step_peak = Peak()
        self.step_plain_peak = self.plain


@dataclass(frozen=True)
class SiteReport:
    """One save site in a report. Bytes are those of plain training for the site's last step."""

    name: str
    consumer: str
    shape: tuple[int, ...]
    dtype: str
    plain_bytes: int
    codec: str
    bits: int | None
    importance: float | None


@dataclass(frozen=True)
class MemoryReport:
    """What was held, against what plain training would have held.

    All sizes are in bytes.

    Attributes:
        budget_bytes: the budget (inf: none), the last one where it changed.
        budget_bytes_at_peak: the budget at the worst moment; None where nothing was held.
        held_bytes_peak: all bytes held for backward at the worst moment: pages, statistics,
            page tables and exact copies.
        stored_bytes_peak: of these, in the arena.
        exact_bytes_peak: of these, kept exactly outside it (what waits for a worker among them).
        plain_bytes: unique bytes that plain training holds in its worst step over the same
            steps; parameters and buffers excluded.
        ratio: plain_bytes / held_bytes_peak.
        mean_bits: mean width of the encoded elements at the worst moment.
        predicted_gradient_error: predicted relative error of the gradient under the last plan
            (NaN without the gradient metric, 0 without a budget).
        overhead_seconds: time in ``kernels``, ``hooks`` and ``planning`` (calibration included).
        weight_bytes, gradient_bytes, optimizer_bytes: of the model and its training state.
        peak_rss_bytes: peak of the process's resident memory above that at the start.
        transient_bytes_peak: of that, what the rows above do not explain: workspace.
        demotions: planes dropped from live activations to make room.
        counts: events by name: ``not_finite`` and ``not_understood`` (tensors kept exactly for
            that), ``recomputed`` (saved by a checkpoint in backward), ``spilled``, ``doubted``
            (derived tensors that a step could not confirm).
        sites: one row a save site.
    """

    budget_bytes: float = math.inf
    budget_bytes_at_peak: float | None = None
    held_bytes_peak: int = 0
    stored_bytes_peak: int = 0
    exact_bytes_peak: int = 0
    plain_bytes: int = 0
    mean_bits: float = 0.0
    predicted_gradient_error: float = math.nan
    overhead_seconds: Mapping[str, float] = field(default_factory=dict)
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    peak_rss_bytes: int = 0
    demotions: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    sites: tuple[SiteReport, ...] = ()

    @property
    def ratio(self) -> float:
        return self.plain_bytes / self.held_bytes_peak if self.held_bytes_peak else math.nan

    @property
    def transient_bytes_peak(self) -> int:
        known = self.held_bytes_peak + self.gradient_bytes + self.optimizer_bytes
        return max(0, self.peak_rss_bytes - known)

    def to_dict(self) -> dict[str, Any]:
        """All figures, JSON-ready but for inf and NaN."""
        values = dataclasses.asdict(self)
        values["ratio"] = self.ratio
        values["transient_bytes_peak"] = self.transient_bytes_peak
        return values

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the figures to ``path`` as JSON (inf as ``"inf"``, NaN as null)."""
        Path(path).write_text(json.dumps(jsonable(self.to_dict()), indent=1), encoding="utf-8")

    def _budgets(self) -> list[tuple[str, float]]:
        """One budget, or the one of the worst moment and the last one."""
        then = self.budget_bytes_at_peak
        if then is None or then == self.budget_bytes:
            return [("budget", self.budget_bytes)]
        return [("budget at that moment", then), ("budget at last", self.budget_bytes)]

    def __str__(self) -> str:
        sizes = [
            ("activations, plain training", self.plain_bytes),
            ("activations, held (peak)", self.held_bytes_peak),
            ("  in the arena", self.stored_bytes_peak),
            ("  exact", self.exact_bytes_peak),
            *self._budgets(),
            ("weights", self.weight_bytes),
            ("gradients", self.gradient_bytes),
            ("optimizer", self.optimizer_bytes),
            ("peak RSS above the start", self.peak_rss_bytes),
            ("  transient", self.transient_bytes_peak),
        ]
        events = "".join(f"; {number} {name}" for name, number in self.counts.items())
        names = {"planning": "planning and calibration"}
        times = ", ".join(
            f"{names.get(name, name)} {seconds:.1f} s"
            for name, seconds in self.overhead_seconds.items()
        )
        return render_table(
            "daf_hf: memory",
            ("bytes of", "MB"),
            [(name, megabytes(nbytes)) for name, nbytes in sizes],
            1,
            f"ratio {self.ratio:.1f}x, {self.mean_bits:.2f} bits a stored element, predicted "
            f"gradient error {measured(self.predicted_gradient_error)}, {self.demotions} "
            f"demotions; time: {times or 'none'}{events}",
        )


def jsonable(value: Any) -> Any:
    """The same without what JSON lacks: inf becomes ``"inf"``, NaN None, tuples lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value


class ResidentPeak:
    """Peak resident memory of this process since the start, above what it was then.

    Uses the kernel's high-water mark where it can be reset (Linux), else samples at each
    :meth:`sample`.
    """

    def __init__(self) -> None:
        self._resets = self._reset()
        self._base = self._peak = self._now()

    @staticmethod
    def _reset() -> bool:
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        except OSError:
            return False
        return True

    @staticmethod
    def _now() -> int:
        import psutil

        return psutil.Process().memory_info().rss

    def sample(self) -> int:
        """Bytes of the peak above the start."""
        self._peak = max(self._peak, self._now())
        if self._resets:
            for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
                if line.startswith("VmHWM:"):
                    self._peak = max(self._peak, int(line.split()[1]) * 1024)
        return self._peak - self._base
