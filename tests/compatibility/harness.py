"""What daf_hf is to work with: cases, each put to the same checks (test_checks.py).

A case is a function that builds a :class:`Subject`; :func:`case` names its row of
``docs/compatibility.md``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from tiny import weights
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from daf_hf import DAFCallback, attach, compress_activations
from daf_hf.accounting import MemoryReport
from daf_hf.saved_tensors import Compressor

CASES: dict[str, Case] = {}

REAL = {"calibrate_at": (0,), "calibration_batch": 64}
"""Options under which the plan of the first step is for the very batch that it was measured on."""


@dataclass(frozen=True)
class Case:
    """A row of the matrix.

    Attributes:
        area: its part of the matrix.
        name: what works.
        build: of a fresh subject; everything random in it is seeded beforehand.
        needs: distributions without which it is skipped, with or without a range of versions.
        share: of what plain training holds, the budget that it is checked under.
        off: by how many times the predicted error a gradient may be off.
        options: of daf_hf, besides the budget.
        lacks: checks that make no sense here, and why.
    """

    area: str
    name: str
    build: Callable[[], Subject]
    needs: tuple[str, ...] = ()
    share: float = 0.4
    off: float = 1.5
    options: dict[str, Any] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)

    def subject(self) -> Subject:
        """A fresh one, the same each time."""
        for needed in map(Requirement, self.needs):
            try:
                installed = version(needed.name)
            except PackageNotFoundError:
                pytest.skip(f"{needed.name} is not installed")
            if installed not in needed.specifier:
                pytest.skip(f"{needed} is needed; installed is {installed}")
        torch.manual_seed(0)
        return self.build()


def case(area: str, name: str, **options: Any) -> Callable[[Callable[[], Subject]], Any]:
    """Have the decorated function build the subject of a case; see :class:`Case`."""

    def register(build: Callable[[], Subject]) -> Callable[[], Subject]:
        assert name not in CASES, name
        CASES[name] = Case(area, name, build, **options)
        return build

    return register


@dataclass
class Run:
    """What a few steps came to.

    Attributes:
        gradients: by name, at the end of the first step.
        weights: at the end.
        report: of daf_hf; None for plain training.
        compressor: of daf_hf; None for plain training.
    """

    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    report: MemoryReport | None = None
    compressor: Compressor | None = None


class Subject(ABC):
    """A model and a way to train it.

    Attributes:
        model: whose modules' calls are compressed.
    """

    model: nn.Module

    @abstractmethod
    def train(
        self,
        steps: int,
        folder: Path,
        options: dict[str, Any] | None = None,
        at_end: Callable[[int, Run], None] = lambda step, run: None,
    ) -> Run:
        """Train on.

        Args:
            steps: so many optimizer steps.
            folder: to write to.
            options: of daf_hf; None to train plainly.
            at_end: called at the end of each step with its number, and the run so far.
        """


class Loop(Subject):
    """A plain training loop.

    Args:
        model: in training mode.
        step: runs a forward and a backward pass.
        optimize: changes the weights; by default a step of SGD.
    """

    def __init__(
        self, model: nn.Module, step: Callable[[], None], optimize: Callable[[], Any] | None = None
    ) -> None:
        self.model = model
        self._step = step
        trained = [p for p in model.parameters() if p.requires_grad]
        self._optimize = optimize or torch.optim.SGD(trained, 1e-2).step

    def train(
        self,
        steps: int,
        folder: Path,
        options: dict[str, Any] | None = None,
        at_end: Callable[[int, Run], None] = lambda step, run: None,
    ) -> Run:
        run = Run()
        daf = None if options is None else compress_activations(self.model, **options)
        if daf is not None:
            run.compressor = daf._session.compressor
        for step in range(steps):
            torch.manual_seed(step)
            with daf or nullcontext():
                self._step()
            if not step:
                run.gradients = gradients_of(self.model)
            self._optimize()
            self.model.zero_grad(set_to_none=True)
            if daf is not None:
                daf.step()
            at_end(step, run)
        run.weights = weights(self.model)
        run.report = daf.report if daf is not None else None
        return run


class Training(Subject):
    """A Trainer, or one of its kind.

    Args:
        model: as given to the trainer.
        make: builds the trainer, from a folder, a number of steps, and callbacks.
        attached: ``daf_hf.attach`` is used in place of the callback.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Path, int, list[TrainerCallback]], Trainer],
        attached: bool = False,
    ) -> None:
        self.model = model
        self._make = make
        self._attached = attached

    def train(
        self,
        steps: int,
        folder: Path,
        options: dict[str, Any] | None = None,
        at_end: Callable[[int, Run], None] = lambda step, run: None,
    ) -> Run:
        run = Run()
        watching = _Watching(run, at_end)
        trainer = self._make(folder, steps, [watching])
        daf = None
        if options is not None and self._attached:
            daf = attach(trainer, **options)
        elif options is not None:
            daf = DAFCallback(**options)
            trainer.add_callback(daf)
        watching.daf = daf
        trainer.train()
        run.weights = weights(trainer.model)
        run.report = daf.report if daf is not None else None
        return run


class _Watching(TrainerCallback):
    daf: DAFCallback | None = None

    def __init__(self, run: Run, at_end: Callable[[int, Run], None]) -> None:
        self._run, self._at_end = run, at_end

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.daf is not None and self._run.compressor is None:
            session = self.daf._session
            assert session is not None
            self._run.compressor = session.compressor

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if not state.global_step:
            self._run.gradients = gradients_of(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._at_end(state.global_step - 1, self._run)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients, by name."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
