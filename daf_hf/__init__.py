"""daf_hf: quantized, paged activations for fine-tuning within a memory budget.

Entry points:

- ``DAFCallback(budget_mb=300)``: a callback for the Hugging Face Trainer.
- ``attach(trainer, budget_mb=300)``: the same, covering losses outside the model too.
- ``compress_activations(model, budget_mb=300)``: a context manager for plain loops.
- ``plan(model, batch)``: what budgets would do, before training.

``DAFConfig`` holds the options, ``MemoryReport`` what came of them, ``BudgetPlan`` what ``plan``
found; ``register_importance`` and ``register_allocator`` add an importance metric or an allocator,
and ``BudgetError`` is raised for a budget that cannot be met. ``codebook_from_samples`` and
``codebook_from_levels`` make a codebook of your own, and ``register_codebook`` gives it a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .accounting import MemoryReport
from .allocation import register_allocator
from .budget_plan import BudgetPlan
from .codecs import codebook_from_levels, register_codebook
from .config import DAFConfig
from .fitting import codebook_from_samples
from .forecast import plan
from .importance import register_importance
from .loops import compress_activations
from .refusal import BudgetError

if TYPE_CHECKING:
    from .callbacks import DAFCallback, attach

__all__ = [
    "BudgetError",
    "BudgetPlan",
    "DAFCallback",
    "DAFConfig",
    "MemoryReport",
    "__version__",
    "attach",
    "codebook_from_levels",
    "codebook_from_samples",
    "compress_activations",
    "plan",
    "register_allocator",
    "register_codebook",
    "register_importance",
]


def __getattr__(name: str) -> Any:
    # transformers is imported only by those who use its Trainer.
    if name in ("DAFCallback", "attach"):
        from . import callbacks

        return getattr(callbacks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
