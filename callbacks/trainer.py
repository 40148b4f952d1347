"""daf_hf in a Hugging Face Trainer: one callback, or ``attach`` for losses outside the model."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging as transformers_logging

from daf_hf.accounting import MemoryReport
from daf_hf.checkpoint import restore as restore_state
from daf_hf.checkpoint import save as save_state
from daf_hf.config import DAFConfig
from daf_hf.forks import OUTER, free_after_fork
from daf_hf.plan_table import plan_table
from daf_hf.reporting import ranks_table
from daf_hf.session import Session

from .loss_watch import LossWatch

logger = logging.getLogger("daf_hf")
trainer_logger = transformers_logging.get_logger("transformers.trainer")

GUARDED = ("_run_epoch", "get_batch_samples", "training_step", "_maybe_log_save_evaluate")
"""Methods of Trainer inside which an exception ends the compression; some versions lack the first.
"""

NOTABLE_SHARE = 0.05
"""Of what the model, or the budget, holds: what a loss outside of it may hold without a word."""

_BEGINNING = free_after_fork(threading.Lock(), OUTER)
"""Held while a session takes another's place: no change of the budget falls between two."""

Found = TypeVar("Found")


class DAFCallback(TrainerCallback):
    """Compress the activations that training saves for backward, within a budget.

    Args:
        config: a :class:`daf_hf.DAFConfig`, a mapping, or the path of a JSON or YAML file.
        **options: options by name; they replace those of ``config``.

    Raises:
        ValueError: for an unknown option or a bad value.

    Example:
        >>> callback = DAFCallback(budget_mb=300)
        >>> Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
        >>> print(callback.report)
    """

    def __init__(self, config: Any = None, **options: Any) -> None:
        self.config = DAFConfig.build(config, **options)
        self._session: Session | None = None
        self._optimizer: Any = None
        self._report = MemoryReport(budget_bytes=self.config.budget_bytes)
        self._reports: tuple[MemoryReport, ...] = ()
        self._covers_loss = False
        self._shown = False
        self._installed = False
        self._before: Session | None = None
        self._unguard: list[Callable[[], None]] = []
        self._loss_watch: LossWatch | None = None

    @property
    def report(self) -> MemoryReport:
        """What was held: so far while training, at the end after it."""
        if self._session is not None:
            self._report = self._session.report(self._optimizer)
        return self._report

    @property
    def reports(self) -> tuple[MemoryReport, ...]:
        """After training in several processes every rank's report, on each of them.

        At any other time this process's alone.
        """
        return self._reports or (self.report,)

    def set_budget(self, budget_mb: float | str) -> None:
        """Change the budget, in MB of 10^6 bytes, from any thread at any moment.

        What is held is within it when this returns, but for what is at its fewest bits already,
        which stays until backward frees it. After the first step, a budget below what the last plan
        needs at the least is raised to that, with one warning a run. Not for signal handlers: they
        interrupt a thread that may be in the middle of this.

        Raises:
            ValueError: when it is neither a positive number nor ``"auto"`` nor ``"recommended"``.
        """
        with _BEGINNING:
            self.config = self.config.with_budget(budget_mb)
            session = self._session
        if session is not None:
            session.set_budget(self.config.budget_mb)

    @contextmanager
    def loss_scope(self) -> Iterator[None]:
        """Compress what a loss outside the model saves too; entered by :func:`attach`."""
        if self._session is None or not torch.is_grad_enabled():
            yield
            return
        with self._session.compressor.scope():
            yield

    # Events ------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._close()
        self._reports = ()
        self._move_to_front()
        if getattr(args, "label_smoothing_factor", 0) and not self._covers_loss:
            logger.warning(
                "daf_hf: label_smoothing_factor moves the loss out of the model, where a callback "
                "cannot compress it; use daf_hf.attach(trainer, ...) instead of callbacks=[...]"
            )
        self._optimizer = kwargs.get("optimizer")
        self._shown = False
        with _BEGINNING:
            session = Session(kwargs["model"], self.config)
            checkpoint = _resumed_from()
            if checkpoint is not None and restore_state(session, checkpoint):
                logger.info("daf_hf: what was measured is taken from %s", checkpoint)
            self.config = session.config
            self._session = session
        self._before = Session.of(session.compressor.model)
        handler = _caller(CallbackHandler)
        if handler is not None:
            self._guard(handler, "call_event")

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Not before: what other callbacks raise as training begins, nothing could be guarded from.
        self._install()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._session is not None:
            self._install()  # a loop may know no epochs
            self._session.begin_step(state.global_step, state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._session is None:
            return
        self._session.end_step()
        self._tell_of_loss(self._session)
        if not self._shown and state.is_world_process_zero:
            self._shown = True
            trainer_logger.warning("\n%s", plan_table(self._session))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        training = args.should_save and not args.save_only_model
        if self._session is not None and training and folder.is_dir():
            save_state(self._session, folder)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._session is None or logs is None or "loss" not in logs:
            return
        metrics = self._session.metrics()
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._session is None:
            return
        self._optimizer = kwargs.get("optimizer", self._optimizer)
        ranks = self._session.met
        self._close()
        self._reports = tuple(ranks.gather(lambda: self._report))
        if state.is_world_process_zero:
            trainer_logger.warning("\n%s", self._report)
            if not ranks.alone:
                trainer_logger.warning("\n%s", ranks_table(self._reports))

    # Beginning and end -------------------------------------------------------------------------

    def _move_to_front(self) -> None:
        """Be the first of the Trainer's callbacks.

        A callback may add to what is logged, but only those behind it see the addition, and the
        reporting integrations are put in front of the user's.
        """
        handler = _caller(CallbackHandler)
        if handler is not None and self in handler.callbacks:
            handler.callbacks.remove(self)
            handler.callbacks.insert(0, self)

    def _install(self) -> None:
        """Begin to compress, unless that was done."""
        session = self._session
        if session is None or self._installed:  # perhaps a later callback has ended it since
            return
        self._installed = True
        other, before = Session.of(session.compressor.model), self._before
        self._before = None
        if other not in (None, before):
            logger.warning(
                "daf_hf: a later callback compresses this model; budget_mb=%s does not count",
                self.config.budget_mb,
            )
            return
        session.install()
        trainer = _caller(Trainer)
        if trainer is not None:
            for name in GUARDED:
                self._guard(trainer, name)
            if not self._covers_loss:
                self._watch_loss(trainer)

    def _guard(self, owner: Any, name: str) -> None:
        """End the compression when a method ends in an exception, of which no event tells."""
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except BaseException:
                self._close()
                raise

        self._replace(owner, name, guarded)

    def _watch_loss(self, trainer: Trainer) -> None:
        """See in the first step how much a loss outside the model holds."""
        self._loss_watch = LossWatch()
        original = trainer.compute_loss_context_manager

        @contextmanager
        def compute_loss_context_manager() -> Iterator[None]:
            watch = self._loss_watch
            with original(), watch.watching() if watch is not None else nullcontext():
                yield

        self._replace(trainer, "compute_loss_context_manager", compute_loss_context_manager)

    def _tell_of_loss(self, session: Session) -> None:
        """Warn of a loss outside the model that holds much; then the watch is over."""
        watch, self._loss_watch = self._loss_watch, None
        if watch is None:
            return
        budget = session.budget.limit_bytes
        if watch.nbytes > NOTABLE_SHARE * min(budget, session.compressor.ledger.plain_peak):
            logger.warning(
                "daf_hf: the loss, computed outside of the model, holds %.3g MB for backward, "
                "which a callback neither compresses nor counts against the budget; use "
                "daf_hf.attach(trainer, ...) instead of callbacks=[...]",
                watch.nbytes / 1e6,
            )

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Put a method in the way of an object's, until :meth:`_close`."""
        own = owner.__dict__.get(name)

        def restore() -> None:
            if owner.__dict__.get(name) is method:
                if own is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)

        setattr(owner, name, method)
        self._unguard.append(restore)

    def _close(self) -> None:
        """Leave model and trainer as they were; the report stays."""
        for restore in self._unguard:
            restore()
        self._unguard.clear()
        self._installed = False
        if self._session is not None:
            self._report = self._session.report(self._optimizer)
            self._session.remove()
            self._session = None


def attach(trainer: Trainer, config: Any = None, **options: Any) -> DAFCallback:
    """Add a :class:`DAFCallback` to a trainer, covering losses outside the model too.

    That is what label smoothing, ``compute_loss_func`` and an overridden ``compute_loss`` need.

    Args:
        trainer: the trainer, before ``train()``.
        config: as for :class:`DAFCallback`.
        **options: as for :class:`DAFCallback`.

    Returns:
        The callback, for its ``report`` and ``set_budget``.

    Raises:
        ValueError: for bad options.
    """
    callback = DAFCallback(config, **options)
    callback._covers_loss = True
    original = trainer.compute_loss_context_manager

    @contextmanager
    def compute_loss_context_manager() -> Iterator[None]:
        with original(), callback.loss_scope():
            yield

    trainer.compute_loss_context_manager = compute_loss_context_manager
    trainer.add_callback(callback)
    return callback


def _caller(kind: type[Found]) -> Found | None:
    """The nearest object of a type among those whose methods are being called.

    Trainer hands a callback no reference to itself, or to the handler that calls it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
        frame = frame.f_back
    return None


def _resumed_from() -> str | None:
    """The folder of the checkpoint that training goes on from, of which no event tells."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Trainer):
            found = frame.f_locals.get("resume_from_checkpoint")
            if isinstance(found, (str, os.PathLike)):
                return os.fspath(found)
        frame = frame.f_back
    return None
