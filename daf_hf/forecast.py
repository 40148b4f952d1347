"""What budgets would do to a model on a batch, told without training."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .accounting import jsonable
from .batches import Inputs, batch_of, signature
from .budgets import RECOMMENDED_ERROR, BudgetSweep, probe_room, round_up
from .calibration import Calibration, CalibrationError, squared_norm
from .config import RECOMMENDED, DAFConfig, check_budget
from .host_memory import short_lived_blocks
from .planning import Plan, Planner
from .saved_tensors import Compressor
from .session import Session, require_trained
from .sites import Batch
from .tables import measured, megabytes, render_table

ROWS = 12
"""Intervals of the table, from the least to what plain training holds, when none are given."""

ROUNDING = 1e-3
"""A relative change of the gradient below this is rounding's, not dropout's."""

SITES_SHOWN = 8
NAME_WIDTH = 34


@dataclass(frozen=True)
class PlannedBudget:
    """One budget, and the plan that it buys.

    Attributes:
        budget_bytes: the budget.
        planned_bytes: what the plan expects to hold, at most the budget. This and all that
            follows are NaN where the fewest bits take more than the budget.
        ratio: plain bytes over planned bytes.
        mean_bits: mean width of the elements that have a choice and are encoded; NaN without any.
        predicted_gradient_error: relative; see :class:`daf_hf.MemoryReport`.
        marks: ``least``, ``recommended``, ``dropout`` (the error is that of another dropout
            seed), ``plain`` and ``asked`` (``budget_mb`` of the options), as they apply.
    """

    budget_bytes: int
    planned_bytes: float
    ratio: float
    mean_bits: float
    predicted_gradient_error: float
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedSite:
    """One save site under the recommended budget. Bytes are for one forward pass of the batch.

    Attributes:
        name, consumer, shape, dtype: where and what is saved, and what reads it.
        plain_bytes, planned_bytes: exactly stored, and as planned.
        codec, bits: the plan; bits are None where the site is stored exactly.
        importance: squared relative gradient error per unit of distortion.
        price: importance times plain bytes; the sites are sorted by it, dearest first.
    """

    name: str
    consumer: str
    shape: tuple[int, ...]
    dtype: str
    plain_bytes: int
    planned_bytes: int
    codec: str
    bits: int | None
    importance: float
    price: float


@dataclass(frozen=True)
class BudgetPlan:
    """What :func:`plan` found. Sizes are in bytes.

    Attributes:
        plain_bytes: what plain training holds for backward of this batch, parameters and buffers
            excluded.
        least_bytes: the least budget that does, with the fewest bits everywhere.
        calibration_bytes: the least budget under which training can calibrate on this batch.
        recommended_bytes: the least budget with a predicted error of at most ``error_allowed``
            (and not below ``calibration_bytes``).
        error_allowed: :data:`daf_hf.budgets.RECOMMENDED_ERROR`.
        dropout_error: relative change of the gradient when nothing but dropout's seed changes,
            ``|g1 - g2| / |g1|``, on the examples and in the norm that the predicted errors are
            measured with; NaN where the model draws no noise.
        budgets: rows by ascending budget.
        sites: all sites that have a choice, under the recommended budget.
    """

    plain_bytes: int
    least_bytes: int
    calibration_bytes: int
    recommended_bytes: int
    error_allowed: float
    dropout_error: float
    budgets: tuple[PlannedBudget, ...]
    sites: tuple[PlannedSite, ...]

    @property
    def recommended_mb(self) -> float:
        """The recommended ``budget_mb``."""
        return self.recommended_bytes / 1e6

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, JSON-ready but for NaN."""
        return dataclasses.asdict(self)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the figures to ``path`` as JSON (NaN as null)."""
        text = json.dumps(jsonable(self.to_dict()), indent=1, allow_nan=False)
        Path(path).write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        return f"{self._budget_table()}\n\n{self._site_table()}"

    def _budget_table(self) -> str:
        rows = [
            (
                ", ".join(row.marks),
                f"{row.budget_bytes / 1e6:,.6g}",
                _figure(row.ratio, ".1f"),
                _figure(row.mean_bits, ".2f"),
                _figure(row.predicted_gradient_error, ".2g"),
            )
            for row in self.budgets
        ]
        noise = (
            "no noise is drawn"
            if math.isnan(self.dropout_error)
            else f"another dropout seed changes the gradient by {measured(self.dropout_error)}"
        )
        return render_table(
            "daf_hf: budgets",
            ("", "budget MB", "ratio", "mean bits", "predicted gradient error"),
            rows,
            4,
            f"plain {megabytes(self.plain_bytes)} MB; recommended budget_mb="
            f"{self.recommended_mb:g} (error at most {self.error_allowed:g}); {noise}{self._floor()}",
        )

    def _floor(self) -> str:
        """Where predictions are worth nothing, because training could not measure."""
        if self.calibration_bytes <= self.least_bytes:
            return ""
        return f"; training cannot calibrate under less than {megabytes(self.calibration_bytes)} MB"

    def _site_table(self) -> str:
        rows = [
            (
                _tail(site.name),
                _first(site.consumer),
                "x".join(map(str, site.shape)),
                megabytes(site.plain_bytes),
                "exact" if site.bits is None else str(site.bits),
                f"{site.importance:.2g}",
            )
            for site in self.sites[:SITES_SHOWN]
        ]
        return render_table(
            "daf_hf: dearest save sites under the recommended budget",
            ("site", "read by", "shape", "plain MB", "bits", "importance"),
            rows,
            4,
            f"{len(self.sites)} sites have a choice; dearest is what has most importance x bytes",
        )


def plan(
    model: nn.Module,
    batch: Any,
    config: Any = None,
    budgets: Iterable[float] | None = None,
    **options: Any,
) -> BudgetPlan:
    """Calibrate once on a batch, and tell what budgets would do. Nothing is trained.

    The model is put into training mode for it, as the Trainer does. Weights, gradients, buffers,
    modes, hooks and random states are afterwards what they were. While it lasts, activations of
    ``calibration_batch`` examples are held exactly, or of fewer where that would take more than
    half of the free memory. Importances, and thus all predictions, are of the weights as they are
    (with parameters that are all zero moved off it, as in training) and of this batch's size:
    give one of the largest that training will see. Call it inside ``torch.autocast`` if training
    uses that.

    Args:
        model: the model with all that is trained, such as PEFT's adapters, and on its device.
        batch: the inputs of one forward pass: a mapping of keyword arguments, or one tensor.
            Labels belong to it; without a loss in the model's outputs a random projection of them
            takes its place.
        config: a :class:`DAFConfig`, a mapping, or the path of a JSON or YAML file. A finite
            ``budget_mb`` of it gets a row of its own, and sets no limit.
        budgets: those of the table, in MB of 10^6 bytes; by default evenly spaced in the
            logarithm from the least to what plain training holds.
        **options: options by name; they replace those of ``config``.

    Returns:
        The figures; ``print`` makes tables of them.

    Raises:
        ValueError: for bad options or budgets, a model with nothing to train, or one that is being
            compressed.
        RuntimeError: when nothing could be measured; says why.

    Example:
        >>> found = daf_hf.plan(model, batch)
        >>> print(found)
        >>> callback = DAFCallback(budget_mb=found.recommended_mb)
    """
    built = DAFConfig.build(config, **options)
    asked = [_budget(b) for b in budgets] if budgets is not None else None
    if asked == []:
        raise ValueError("budgets=[]: give at least one number of MB, or leave it out")
    require_trained(model)
    if Session.of(model) is not None:
        raise ValueError("the model is being compressed: plan before or after that training")
    measuring = dataclasses.replace(built, budget_mb=RECOMMENDED, calibrate_at=(0,))
    compressor = Compressor(model, measuring)
    inputs = _inputs(batch, compressor.device)
    calibration = _calibrate(compressor, inputs)
    planner, size = Planner(compressor), batch_of(inputs)
    planner.learn_candidates(size)
    if not compressor.placement.calibrated:
        raise RuntimeError(
            "no saved tensor of this model and batch can be compressed: they are too small, not "
            "floating point, or excluded by the options"
        )
    sweep = BudgetSweep(planner, signature(inputs), size)
    return _budget_plan(sweep, calibration, asked, built)


class _NoiseCalibration(Calibration):
    """A calibration that also measures what dropout's seed does to the gradient.

    Attributes:
        dropout_error: see :class:`BudgetPlan`.
    """

    dropout_error = math.nan

    def _measure_at(self, size: Batch) -> None:
        super()._measure_at(size)
        total = weights = 0.0
        for start, count in self._parts(size):
            part = Batch(count, size.tokens)
            self._reference, other = self._gradients(start, part), self._gradients(start, part)
            change = [
                None if a is None or b is None else a - b
                for a, b in zip(other, self._reference, strict=True)
            ]
            weight = squared_norm(self._reference)
            total += weight * self._relative(change)
            weights += weight
        error = math.sqrt(total / weights) if weights > 0 else math.nan
        self.dropout_error = error if error > ROUNDING else math.nan

    def _gradients(self, start: int, part: Batch) -> list[Tensor | None]:
        with self._build(start, part) as graph:
            return graph.gradients(self._parameters)


def _calibrate(compressor: Compressor, inputs: Inputs) -> _NoiseCalibration:
    model, room = compressor.model, probe_room(compressor.device)
    # Importances are measured on retained graphs, which donated buffers would forbid.
    functorch_config.donated_buffer = False
    calibration = _NoiseCalibration(compressor, model.forward, inputs, room)
    compressor.tracker.install()
    try:
        with torch.enable_grad(), _training(model), short_lived_blocks():
            compressor.begin_forward()
            calibration.run()
    except CalibrationError as error:
        raise RuntimeError(
            f"nothing could be measured: {error} (the budget is here half of the free memory, "
            f"{megabytes(room)} MB)"
        ) from None
    finally:
        compressor.tracker.remove()
        compressor.release_idle()
    return calibration


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in training mode."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _inputs(batch: Any, device: torch.device) -> Inputs:
    args = () if isinstance(batch, Mapping) else (batch,)
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    return tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
    )


def _budget(value: Any) -> int:
    number = check_budget(value)
    if isinstance(number, str) or math.isinf(number):
        raise ValueError(f"budgets: {value!r} is not a finite number of MB")
    return round(number * 1e6)


def _budget_plan(
    sweep: BudgetSweep, calibration: _NoiseCalibration, asked: list[int] | None, config: DAFConfig
) -> BudgetPlan:
    least, plain = sweep.least_bytes, calibration.plain_bytes
    recommended = sweep.recommended(calibration.least_bytes)
    noise = calibration.dropout_error
    marks: dict[int, list[str]] = {}

    def mark(budget: int, *names: str) -> None:
        marks.setdefault(budget, []).extend(names)

    for budget in asked if asked is not None else _spaced(least, plain):
        mark(budget)
    mark(round_up(least), "least")
    mark(recommended, "recommended")
    if not math.isnan(noise):
        mark(sweep.budget_for(noise), "dropout")
    if math.isfinite(config.budget_bytes):
        mark(round(config.budget_bytes), "asked")
    mark(round_up(plain), "plain")
    rows = [
        _row(budget, sweep.at(budget), least, plain, tuple(names))
        for budget, names in sorted(marks.items())
    ]
    return BudgetPlan(
        plain_bytes=plain,
        least_bytes=least,
        calibration_bytes=math.ceil(calibration.least_bytes),
        recommended_bytes=recommended,
        error_allowed=RECOMMENDED_ERROR,
        dropout_error=noise,
        budgets=tuple(rows),
        sites=tuple(_sites(sweep.at(recommended))),
    )


def _spaced(least: int, most: int) -> list[int]:
    """Budgets between the two, evenly spaced in the logarithm."""
    ratio = max(1.0, most / least)
    return [round_up(least * ratio ** (k / ROWS)) for k in range(1, ROWS)]


def _row(budget: int, found: Plan, least: int, plain: int, marks: tuple[str, ...]) -> PlannedBudget:
    if budget < least:
        return PlannedBudget(budget, math.nan, math.nan, math.nan, math.nan, marks)
    ratio = plain / found.nbytes if found.nbytes else math.nan
    return PlannedBudget(budget, found.nbytes, ratio, found.mean_bits, found.error, marks)


def _sites(found: Plan) -> list[PlannedSite]:
    sites = []
    for site, option in found.options.items():
        assert site.probed is not None and site.importance is not None
        numel, _ = site.probed.predict(found.batch)
        nbytes = numel * site.probed.uses * site.dtype.itemsize
        sites.append(
            PlannedSite(
                name=site.name,
                consumer=site.consumer,
                shape=tuple(site.probed.shape),
                dtype=str(site.dtype).removeprefix("torch."),
                plain_bytes=nbytes,
                planned_bytes=option.nbytes,
                codec="exact" if option.codec is None else str(option.codec),
                bits=option.bits,
                importance=site.importance,
                price=site.importance * nbytes,
            )
        )
    return sorted(sites, key=lambda site: -site.price)


def _figure(value: float, form: str) -> str:
    return "-" if math.isnan(value) else f"{value:{form}}"


def _tail(name: str) -> str:
    """The end of a long name: beginnings are much the same."""
    return name if len(name) <= NAME_WIDTH else "…" + name[1 - NAME_WIDTH :]


def _first(consumer: str) -> str:
    """The first of several consumers."""
    first, *others = consumer.split()
    return f"{first} +{len(others)}" if others else first
