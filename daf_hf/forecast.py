"""What budgets would do to a model on a batch, told without training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .batches import Inputs, signature
from .budget_plan import BudgetPlan, PlannedBudget, PlannedSite
from .budgets import RECOMMENDED_ERROR, BudgetSweep, probe_room, round_up
from .calibration import Calibration, CalibrationError
from .config import RECOMMENDED, DAFConfig, check_budget
from .gradient_error import squared_norm
from .host_memory import short_lived_blocks
from .planning import Planner
from .plans import Plan
from .rows import Rows
from .saved_tensors import Compressor
from .session import Session
from .sites import Batch
from .tables import megabytes
from .trained import require_trained
from .vocabulary import chunk_losses

ROWS = 12
"""Intervals of the table, from the least to what plain training holds, when none are given."""

ROUNDING = 1e-3
"""A relative change of the gradient below this is rounding's, not dropout's."""


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
    planner, size = Planner(compressor), Rows(inputs).batch
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
            reference, other = self._gradients(start, part), self._gradients(start, part)
            change = [
                None if a is None or b is None else a - b
                for a, b in zip(other, reference, strict=True)
            ]
            weight = squared_norm(reference)
            total += weight * self._errors.of(change, reference)
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
    restore_heads = chunk_losses(model, compressor.config.chunked_loss)
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
        restore_heads()
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
    least, plain = sweep.feasible_bytes(calibration.least_bytes), calibration.plain_bytes
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
        mark(max(sweep.budget_for(noise), round_up(least)), "dropout")
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
