"""One model under compression: its forward wrapped, calibrated, planned and accounted for."""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn

from .accounting import MemoryReport, ResidentPeak
from .advice import Advice
from .agreement import Terms
from .batches import Inputs, batch_of, signature
from .budget import Budget
from .budgets import BudgetSweep, probe_room
from .calibration import Calibration
from .calibration_schedule import CalibrationSchedule
from .compilers import keep_out
from .config import RECOMMENDED, DAFConfig
from .distributed import ALONE, needs_others, ranks_of
from .forward import wrap_forward
from .host_memory import trim_heap, tune_malloc
from .planning import Planner
from .plans import Plan
from .pooling import Outcome, measure, pool
from .reporting import memory_report
from .rows import Rows
from .saved_tensors import Compressor
from .sites import Batch
from .trained import require_trained, touch_weights
from .vocabulary import chunk_losses

logger = logging.getLogger("daf_hf")

_INSTALLED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Session]] = weakref.WeakKeyDictionary()


@dataclass
class _Pass:
    """A forward pass in progress.

    Attributes:
        scope: what is to be left at its end.
        key, plan: the inputs' signature, and the plan for them; None without a budget.
        held, lost, limits: bytes held, bytes that tensors have lost or done without for want of
            room, and changes of the limit, all before it.
        tells: whether its failure is to be told to the other ranks, or theirs to be heard of.
    """

    scope: ExitStack = field(default_factory=ExitStack)
    key: Any = None
    plan: Plan | None = None
    held: int = 0
    lost: int = 0
    limits: int = 0
    tells: bool = False


class Session:
    """Compression of one model's saved tensors.

    Args:
        model: the root module whose forward passes are compressed.
        config: the options.

    Raises:
        ValueError: when the model has no parameter that is trained.

    Attributes:
        schedule: when a calibration is due.
        recall: before the next forward pass, takes up what an earlier session has learnt; False
            when that must wait for another one.
        configured: the options as they were given; ``config`` has the budget asked for since.
        ranks: that make the present forward pass, or the last one, together.
        met: the last that were more than one.
    """

    def __init__(self, model: nn.Module, config: DAFConfig) -> None:
        require_trained(model)
        self.compressor = Compressor(model, config)
        self.planner = Planner(self.compressor)
        self.advice = Advice(self.planner)
        self.configured = config
        self.budget = Budget(config, self.compressor, self.planner)
        self.installed = False
        self.ranks = self.met = ALONE
        self.step = 0
        self._last_pass: _Pass | None = None
        self._unlearnt: _Pass | None = None
        self._restore: Callable[[], None] | None = None
        self._restore_heads: Callable[[], None] | None = None
        self.schedule = CalibrationSchedule(config)
        self._calibration_failed = False
        self._calibration_needs = 0.0
        self._steps_here = 0
        self.recall: Callable[[Callable[..., Any], Inputs], bool] | None = None
        touch_weights(model)
        self._resident = ResidentPeak()
        tune_malloc()

    @property
    def config(self) -> DAFConfig:
        """The options, with the budget that was asked for last."""
        return self.budget.config

    # Installing --------------------------------------------------------------------------------

    def install(self) -> None:
        """Wrap the model's forward and follow its submodules' calls; see :meth:`remove`.

        A model has one session at a time: another one that is installed is removed.
        """
        if self.installed:
            return
        model = self.compressor.model
        other = Session.of(model)
        if other is not None:
            logger.warning("daf_hf: an earlier compression of this model was still on; it ends")
            other.remove()
        # Importances are measured on retained graphs, which donated buffers would forbid.
        functorch_config.donated_buffer = False
        keep_out()
        self._restore = wrap_forward(model, self)
        self._restore_heads = chunk_losses(model, self.config.chunked_loss)
        self.compressor.tracker.install()
        _INSTALLED[model] = weakref.ref(self)
        self.installed = True
        self.budget.install()

    def remove(self) -> None:
        """Leave the model as it was found. What is still held stays until its graph goes."""
        if not self.installed:
            return
        self.installed = self.budget.installed = False
        self.compressor.tracker.remove()
        # A garbage collection may have brought us here, in a thread that holds the lock.
        self.compressor.placement.release_when_free(None)
        if self._restore is not None:
            self._restore()
            self._restore = None
        if self._restore_heads is not None:
            self._restore_heads()
            self._restore_heads = None

    def __del__(self, suppress: Any = suppress) -> None:  # globals may be gone at exit
        # Whoever trains may have died without removing us.
        with suppress(Exception):
            self.remove()

    @staticmethod
    def of(model: nn.Module) -> Session | None:
        """The session that is installed on a model, if there is one."""
        reference = _INSTALLED.get(model)
        session = reference() if reference is not None else None
        return session if session is not None and session.installed else None

    # Running -----------------------------------------------------------------------------------

    def begin_pass(self, original: Callable[..., Any], inputs: Inputs) -> _Pass:
        """Of :mod:`daf_hf.forward`: calibrate if it is due, plan, enter the hooks' scope."""
        compressor = self.compressor
        current = _Pass()
        self.ranks = ranks_of(compressor.model)
        self.met = self.met if self.ranks.alone else self.ranks
        terms = self._terms(original, inputs)
        if math.isinf(terms.limit_bytes):
            self._unlearnt = None
            compressor.learn_parameters()
        else:
            began = perf_counter()
            compressor.begin_forward()
            self._learn_from_last_pass(terms.wanted_bytes)
            if self._recommends_anew(terms):
                terms = self._agree(inputs)
            current.limits = compressor.arena.limits_set
            if terms.due:
                self._calibrate(original, inputs, batch=terms.batch)
            compressor.rows = Rows(inputs) if self.config.skip_padding else None
            current.key = self._key(inputs)
            current.plan = self.planner.plan(current.key, terms.batch, terms.limit_bytes)
            self.planner.apply(current.plan)
            arena = compressor.arena
            current.held, current.lost = arena.held_bytes, compressor.placement.room.lost_bytes
            compressor.ledger.pass_peak = 0
            # Beside an earlier pass that is still held, an overflow says nothing of the budget:
            # the planner shares it out among them from now on.
            first = not self._steps_here and not current.held
            refuses = self.config.on_overflow == "error" and not self.budget.provisional
            compressor.placement.refuses = first and refuses
            if not self.ranks.rank:
                self.advice.judge(current.key, current.plan, self._calibration_needs)
            current.tells = not self._steps_here
            compressor.ledger.planning_seconds += perf_counter() - began
        if not compressor.on_top or compressor.recomputes:
            current.scope.enter_context(compressor.scope())
        return current

    def _terms(self, original: Callable[..., Any], inputs: Inputs) -> Terms:
        """What this pass goes by, once what is to be had beforehand is there."""
        terms = self._agree(inputs)
        if terms.recalls:
            self._recall(original, inputs)
            terms = self._agree(inputs)
        if terms.undecided:
            self._take_recommended(original, inputs, terms)
            terms = self._agree(inputs)
        return terms

    def _agree(self, inputs: Inputs) -> Terms:
        limit, undecided = self.compressor.arena.limit_bytes, self.budget.undecided
        if undecided:
            due = not self.compressor.placement.calibrated
        else:
            changed = bool(self.compressor.unplanned) and not self._calibration_failed
            due = math.isfinite(limit) and self.schedule.due(self.step, changed)
        planned = undecided or math.isfinite(limit)
        batch = Rows(inputs).batch if planned else batch_of(inputs)
        recalls, wanted = self.recall is not None, self._wanted_bytes()
        return Terms(batch, limit, due, recalls, undecided, wanted).agreed(self.ranks)

    def _key(self, inputs: Inputs) -> tuple[Any, ...]:
        """What plans are known by. Ranks whose inputs differ in shape have one for all."""
        return signature(inputs) if self.ranks.alone else ()

    def _recall(self, original: Callable[..., Any], inputs: Inputs) -> None:
        """Take up what an earlier session has learnt, on each rank that has something of it."""

        def recall() -> Outcome:
            self.compressor.begin_forward()
            alone = not needs_others(self.compressor.model)
            if self.recall is not None and (not alone or self.recall(original, inputs)):
                self.recall = None
            return Outcome()

        pool(self.ranks, self.compressor.tracker, recall)
        self.planner.forget()

    def end_pass(self, current: _Pass, completed: bool) -> None:
        """Of :mod:`daf_hf.forward`: leave the scope, and learn from a pass that was completed.

        Raises:
            BudgetError: when even the fewest bits exceed the budget.
        """
        current.scope.close()
        self.compressor.rows = None
        error = self.compressor.placement.take_refusal()
        self.compressor.placement.tell()
        ranks = self.ranks if current.tells else ALONE
        if not completed:
            return ranks.fail(sys.exc_info()[1])
        if error is not None:
            ranks.fail(error)
            raise error
        if current.key is None:
            return
        ranks.gather(lambda: None)
        self._last_pass = self._unlearnt = current

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the last pass that was completed."""
        return self._last_pass.plan if self._last_pass is not None else None

    def _wanted_bytes(self) -> int | None:
        """What the last pass, and a loss outside the model, really wanted."""
        last, arena = self._unlearnt, self.compressor.arena
        if last is None or last.plan is None or last.limits != arena.limits_set:
            return None  # what a change of the budget did to it will not come again
        if last.held or self.compressor.held_bytes():
            return None
        lost = self.compressor.placement.room.lost_bytes - last.lost
        return self.compressor.ledger.pass_peak + lost

    def learn(self) -> None:
        """Learn from the last pass now: the next one may be another session's."""
        wanted = self._wanted_bytes() if self.ranks.alone else None
        if wanted is not None:
            self._learn_from_last_pass(wanted)

    def _learn_from_last_pass(self, wanted_bytes: int | None) -> None:
        last, self._unlearnt = self._unlearnt, None
        if wanted_bytes is not None and last is not None and last.plan is not None:
            self.planner.learn_from(last.key, last.plan, wanted_bytes)

    def _calibrate(
        self,
        original: Callable[..., Any],
        inputs: Inputs,
        limit_bytes: float | None = None,
        batch: Batch | None = None,
    ) -> None:
        """Measure importances, holding at most so many bytes (the budget where None).

        All ranks do; afterwards they know the same. ``batch`` is what options are judged for.
        """
        logger.info("daf_hf: calibrating at step %d", self.step)
        anew = self.schedule.anew(self.step)
        work = partial(Calibration, self.compressor, original, inputs, limit_bytes, anew)
        outcome = pool(self.ranks, self.compressor.tracker, lambda: measure(work()))
        if not outcome.trains:
            return  # the next forward pass may be the one that trains
        self._calibration_failed = bool(outcome.failure)
        if outcome.failure:
            log = logger.info if self.ranks.rank else logger.warning
            log("daf_hf: no calibration at step %d: %s", self.step, outcome.failure)
            placement = self.compressor.placement
            placement.frugal = not placement.calibrated
        else:
            self._calibration_needs = outcome.least_bytes
            logger.info("daf_hf: calibrated in %.1f s", outcome.seconds)
            if not self.ranks.rank:
                self.advice.tell_of_unmeasured()
        self.schedule.done(self.step, outcome.seconds)
        self.planner.token_seconds = outcome.token_seconds or self.planner.token_seconds
        self.planner.learn_candidates(batch or Rows(inputs).batch)
        self.planner.share_times(self.ranks)

    def _take_recommended(self, original: Callable[..., Any], inputs: Inputs, terms: Terms) -> None:
        """Let a calibration choose the budget; none is taken where nothing can be measured yet.

        Raises:
            RuntimeError: when the calibration failed, and there is no earlier budget to go on with.
        """
        compressor = self.compressor
        began = perf_counter()
        compressor.begin_forward()
        if terms.due:
            self._calibrate(original, inputs, probe_room(compressor.device), terms.batch)
        if self._calibration_failed and not compressor.placement.calibrated:
            if self.budget.running:
                logger.warning(
                    "daf_hf: budget_mb=%r: nothing could be measured; the budget stays", RECOMMENDED
                )
                self.budget.undecided = False
                return
            raise RuntimeError(
                f"budget_mb={RECOMMENDED!r}: nothing could be measured (the warning before this "
                "says why). Use a number of MB, or shorter sequences."
            )
        if compressor.placement.calibrated:
            sweep = BudgetSweep(self.planner, self._key(inputs), terms.batch)
            self.budget.recommend(sweep.recommended(self._calibration_needs))
        compressor.ledger.planning_seconds += perf_counter() - began

    def _recommends_anew(self, terms: Terms) -> bool:
        """Whether a budget that was recommended is raised, once what is held in a step is known.

        A calibration knows neither what a loss outside the model saves, nor of several forward
        passes before one backward.
        """
        last = self._last_pass
        if not self.budget.provisional or last is None or last.plan is None:
            return False
        ended = self.ranks.alone and not self.compressor.held_bytes()
        if terms.wanted_bytes is None and not ended:
            return False
        sweep = BudgetSweep(self.planner, last.key, last.plan.batch)
        return self.budget.settle(sweep.recommended(self._calibration_needs))

    # Steps and budget --------------------------------------------------------------------------

    def begin_step(self, step: int, steps: int | None = None) -> None:
        """An optimizer step begins.

        Args:
            step: counts from 0.
            steps: of the whole training, where that is known.

        Raises:
            ValueError: when the schedule cannot say the step's budget.
        """
        self.step = step
        self.compressor.ledger.start_step()
        self.budget.begin_step(step, steps)

    def end_step(self) -> None:
        """An optimizer step was made: from now on an overflow no longer refuses the budget."""
        self._steps_here += 1
        self.budget.running = True
        self.compressor.placement.refuses = False
        self.compressor.placement.tell()
        self._resident.sample()
        trim_heap()

    def set_budget(self, budget_mb: float | str, cause: str = "set_budget") -> None:
        """Change the budget, in MB of 10^6 bytes, from any thread at any moment.

        See :meth:`daf_hf.budget.Budget.set`.

        Raises:
            ValueError: when it is neither a positive number nor ``"auto"`` nor ``"recommended"``,
                which the next forward pass then puts a number to.
        """
        self.budget.set(budget_mb, cause)

    # Reporting ---------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """The figures for a log: of the worst moment since the last step began."""
        ledger = self.compressor.ledger
        peak = ledger.step_peak
        budget = self.compressor.arena.limit_bytes if peak.budget is None else peak.budget
        return {
            "daf/held_mb": peak.held / 1e6,
            "daf/budget_mb": budget / 1e6,
            "daf/ratio": ledger.step_plain_peak / peak.held if peak.held else math.nan,
            "daf/mean_bits": peak.mean_bits,
        }

    def report(self, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
        """What was held so far; see :class:`MemoryReport`."""
        if math.isinf(self.compressor.arena.limit_bytes):
            error = 0.0
        elif self.config.importance == "gradient" and self.last_plan:
            error = self.last_plan.error
        else:
            error = math.nan
        return memory_report(self.compressor, error, self._resident, optimizer)
