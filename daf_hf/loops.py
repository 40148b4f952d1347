"""Compression in plain training loops."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

from torch import nn

from .accounting import MemoryReport
from .config import DAFConfig
from .distributed import trained_module
from .session import Session

_SESSIONS: weakref.WeakKeyDictionary[nn.Module, Session] = weakref.WeakKeyDictionary()
_OTHER_OPTIONS = (
    "the model is being compressed already, with other options: leave that compress_activations "
    "block (or that training) first, or use the same options"
)


class compress_activations:
    """Compress what autograd saves inside the ``with`` block: forward passes and losses.

    Usable around each micro-batch (what was learnt is kept with the model) or around the whole
    loop. Call :meth:`step` after each optimizer step; without it, everything counts as the first
    step: importances are measured once and an infeasible budget is always refused.

    Args:
        model: the module whose calls are compressed. Of ``DistributedDataParallel`` it is the one
            inside, whose names ``include`` and ``exclude`` go by.
        config: a :class:`DAFConfig`, a mapping, or the path of a JSON or YAML file.
        **options: options by name; they replace those of ``config``.

    Raises:
        ValueError: for bad options, a model with nothing to train, or one that is being
            compressed already with other options.

    Example:
        >>> with compress_activations(model, budget_mb=300) as daf:
        ...     for batch in loader:
        ...         model(**batch).loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         daf.step()
    """

    def __init__(self, model: nn.Module, config: Any = None, **options: Any) -> None:
        built = DAFConfig.build(config, **options)
        model = trained_module(model)
        session = _SESSIONS.get(model)
        if session is None or session.configured != built:
            if Session.of(model) is not None:
                raise ValueError(_OTHER_OPTIONS)
            session = Session(model, built)
            session.begin_step(0)
            _SESSIONS[model] = session
        self._session = session
        self._entered: list[tuple[Any, bool]] = []

    def __enter__(self) -> compress_activations:
        active = Session.of(self._session.compressor.model)
        if active not in (None, self._session):
            raise ValueError(_OTHER_OPTIONS)
        outermost = not self._session.installed
        self._session.install()
        scope = self._session.compressor.scope()
        scope.__enter__()
        self._entered.append((scope, outermost))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        scope, outermost = self._entered.pop()
        try:
            scope.__exit__(kind, error, traceback)
        finally:
            if outermost:
                self._session.remove()

    def step(self) -> None:
        """An optimizer step was made."""
        self._session.end_step()
        self._session.begin_step(self._session.step + 1)

    def set_budget(self, budget_mb: float | str) -> None:
        """Change the budget, until a block with other options; see
        :meth:`daf_hf.DAFCallback.set_budget`.
        """
        self._session.set_budget(budget_mb)

    @property
    def report(self) -> MemoryReport:
        """What was held so far."""
        return self._session.report()
