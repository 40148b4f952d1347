"""Every option, validated where it enters."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import yaml

from .schedule import check_schedule

BACKENDS = ("auto", "reference", "cpu", "triton", "cuda")
PACKING = ("device", "host", "auto")
OVERFLOW = ("error", "spill")
CHECKPOINT_BITS = {"exact": 32, 8: 8}
ALL_BITS = (0, 1, 2, 3, 4, 5, 6, 7, 8)
OWN_RULES = ("uniform", "fixed8", "actnn", "gact")
"""Allocators that do not go by an option's cost."""

RECOMMENDED = "recommended"
"""In place of a number of MB: the first calibration chooses."""

AUTO = "auto"
"""In place of a number of MB: what the device has left."""


def _option(default: Any, text: str) -> Any:
    """A field with a help text, as PEFT's and transformers' arguments have."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class DAFConfig:
    """Options of daf_hf.

    Raises:
        ValueError: for an unknown option or a bad value, naming the option, the value and what
            is allowed.
    """

    budget_mb: float | str = _option(
        math.inf,
        "Hard cap, in MB of 10^6 bytes, on all bytes held for the backward pass. inf stores "
        "everything exactly; 'recommended' leaves the number to the first calibration, 'auto' "
        "follows what the device has left.",
    )
    budget_schedule: Any = _option(
        (),
        "Budgets that follow budget_mb: a list of [step, MB] pairs, with a step number (an "
        "integer) or a fraction of the training (0.0 to 1.0) as the step; a callable "
        "(step, steps) -> MB, or its name as 'package.module:object' or 'path/to/file.py:object'.",
    )
    headroom_mb: float = _option(
        500.0, "With budget_mb='auto': MB of the device's memory to keep free."
    )
    budget_step_mb: float = _option(
        100.0,
        "With budget_mb='auto': the budget moves in steps of so many MB, and is at least one.",
    )
    time_budget: float = _option(
        math.inf,
        "What encoding and restoring may take, as a fraction of a plain step's forward and "
        "backward pass; inf: whatever it takes. budget_mb comes first.",
    )
    bits: tuple[int, ...] = _option(
        (0, 1, 2, 3, 4, 5, 6, 8), "Bit widths that the allocator may choose from."
    )
    importance: str | Callable[..., float] = _option(
        "gradient",
        "Importance metric: 'gradient', 'error', 'magnitude', 'variance', 'actnn', 'gact', another "
        "registered name, 'package.module:object', 'path/to/file.py:object', or a callable "
        "(site, probe) -> float.",
    )
    allocator: str | Callable[..., Any] = _option(
        "greedy",
        "How bits are shared out: 'greedy', 'uniform', 'fixed8', 'actnn', 'gact', 'exact', another "
        "registered name, 'package.module:object', 'path/to/file.py:object', or a callable "
        "(sites, budget) -> list of options.",
    )
    codec: Any = _option(
        "auto",
        "How elements become bits: 'auto' (at each site what is measured to be best), a codec's "
        "name such as 'group+uniform' for all sites, a codec or codebook of your own "
        "('package.module:object', 'path/to/file.py:object', an entry point, the object), or a "
        "list of these, from which the best is measured.",
    )
    backend: str = _option(
        "auto",
        "Kernels: 'auto', 'reference' (plain torch), 'cpu' (native), 'triton' or 'cuda' (GPUs).",
    )
    packing: str = _option(
        "device",
        "Who encodes: 'device' (the tensor's own, at once), 'host' (a thread of the CPU, into host "
        "memory, while the forward pass goes on) or 'auto' (on a GPU the faster one, measured).",
    )
    on_overflow: str = _option(
        "error",
        "When even the fewest bits do not fit: 'error' refuses the budget in the first step (and "
        "spills later on, so that a run is not lost); 'spill' goes to host memory (from an "
        "accelerator) or to a temporary file (from a CPU) from the start, as do the planes that "
        "are dropped otherwise.",
    )
    spill_mb: float = _option(
        math.inf,
        "MB that may be spilled at any moment; when they are used up, planes are dropped, and what "
        "has no room at the fewest bits is refused (BudgetError).",
    )
    calibration_batch: int = _option(4, "Examples of a batch that a calibration probes.")
    calibrate_at: tuple[int, ...] = _option(
        (0, 20, 80), "Optimizer steps before which importances are measured."
    )
    recalibrate_every: int = _option(
        0, "Measure again each so many steps after that; 0: only when the set of sites changes."
    )
    calibration_share: float = _option(
        0.05,
        "Of the time of a run so far, what all its calibrations may take, above 0 and up to 1. "
        "Those of calibrate_at take place in any case; others are put off.",
    )
    skip_padding: bool = _option(
        False,
        "Do not store the rows of tokens that no gradient reaches: padding, by the model's "
        "attention_mask, and all but the first token in what a last layer computes for it alone. "
        "For models that lay out examples first, and whose loss is computed inside them.",
    )
    chunked_loss: bool | str = _option(
        "auto",
        "Compute a language model's loss over chunks of tokens, so that its logits are never there "
        "as a whole: True, False, or 'auto', where the vocabulary has 8192 tokens or more.",
    )
    derive: bool = _option(
        True, "Do not store what follows from other saved tensors; False is for comparison."
    )
    checkpoint_inputs: str | int = _option(
        "exact",
        "Inputs of checkpointed regions, from which these are run again in backward: 'exact', or "
        "8, to store them in 8 bits where there is a budget.",
    )
    include: tuple[str, ...] = _option(
        ("*",), "Patterns (fnmatch) of the modules whose saved tensors are compressed."
    )
    exclude: tuple[str, ...] = _option(
        (), "Patterns (fnmatch) of the modules whose saved tensors are kept exactly."
    )
    seed: int = _option(0, "Seed of the calibration's own random numbers.")

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "budget_mb", check_budget(self.budget_mb))
        put(self, "budget_schedule", check_schedule(self.budget_schedule))
        put(self, "spill_mb", _size("spill_mb", self.spill_mb, zero=True, endless=True))
        put(self, "headroom_mb", _size("headroom_mb", self.headroom_mb, zero=True))
        put(self, "budget_step_mb", _size("budget_step_mb", self.budget_step_mb))
        put(self, "bits", self._bits())
        put(self, "calibrate_at", _integers("calibrate_at", self.calibrate_at, 0))
        put(self, "include", _patterns("include", self.include))
        put(self, "exclude", _patterns("exclude", self.exclude))
        if not self.include:
            raise ValueError("include=(): use at least one module pattern, or '*' for all")
        for name in ("skip_padding", "derive"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: use True or False")
        if not isinstance(self.chunked_loss, bool) and self.chunked_loss != "auto":
            raise ValueError(f"chunked_loss={self.chunked_loss!r}: use True, False or 'auto'")
        if isinstance(self.checkpoint_inputs, (bool, float)) or (
            self.checkpoint_inputs not in CHECKPOINT_BITS
        ):
            raise ValueError(f"checkpoint_inputs={self.checkpoint_inputs!r}: use 'exact' or 8")
        _choice("backend", self.backend, BACKENDS)
        _choice("packing", self.packing, PACKING)
        _choice("on_overflow", self.on_overflow, OVERFLOW)
        for name, least in (("calibration_batch", 1), ("recalibrate_every", 0), ("seed", 0)):
            put(self, name, _integer(name, getattr(self, name), least))
        put(self, "time_budget", _number("time_budget", self.time_budget))
        if math.isfinite(self.time_budget) and self.allocator in OWN_RULES:
            raise ValueError(
                f"time_budget={self.time_budget!r}: allocator={self.allocator!r} has a rule of its "
                "own, which knows no time; use 'greedy' or 'exact'"
            )
        share = _number("calibration_share", self.calibration_share)
        if share > 1:
            raise ValueError(f"calibration_share={share!r}: use a number above 0, up to 1")
        put(self, "calibration_share", share)
        # Here, because what they import knows the config.
        from .allocation import resolve_allocator
        from .candidates import resolve_codecs
        from .importance import resolve_importance

        resolve_importance(self.importance)
        resolve_allocator(self.allocator)
        if isinstance(self.codec, list):
            put(self, "codec", tuple(self.codec))
        resolve_codecs(self.codec)
        self._check_recommended()
        if self.budget_mb == AUTO and self.budget_schedule != ():
            raise ValueError(
                f"budget_schedule={self.budget_schedule!r}: budget_mb={AUTO!r} follows the device, "
                "and no schedule; use one of the two"
            )

    def _check_recommended(self) -> None:
        """What a budget is recommended by must be measured."""
        if self.budget_mb != RECOMMENDED:
            return
        if self.importance != "gradient":
            raise ValueError(
                f"importance={self.importance!r} predicts no gradient error, by which "
                f"budget_mb={RECOMMENDED!r} is chosen: use importance='gradient' or a number of MB"
            )
        if not self.calibrate_at and not self.recalibrate_every:
            raise ValueError(
                f"calibrate_at=() measures nothing, and budget_mb={RECOMMENDED!r} is chosen by "
                "what is measured: use calibrate_at=(0,) or a number of MB"
            )

    def _bits(self) -> tuple[int, ...]:
        bits = _integers("bits", self.bits, 0)
        if not bits or any(b not in ALL_BITS for b in bits):
            raise ValueError(f"bits={self.bits!r}: use a non-empty selection of {ALL_BITS}")
        return tuple(sorted(set(bits)))

    @property
    def budget_bytes(self) -> float:
        """The budget in bytes (inf when there is none, or none yet)."""
        return math.inf if isinstance(self.budget_mb, str) else self.budget_mb * 1e6

    @property
    def checkpoint_bits(self) -> int:
        """Fewest bits of the inputs of checkpointed regions; 32 where they are kept exactly."""
        return CHECKPOINT_BITS[self.checkpoint_inputs]

    def with_budget(self, budget_mb: Any) -> DAFConfig:
        """The same options with another budget.

        Raises:
            ValueError: when it is no budget; see :func:`check_budget`.
        """
        return dataclasses.replace(self, budget_mb=budget_mb)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> DAFConfig:
        """A config from a mapping of options.

        Raises:
            ValueError: for an unknown option or a bad value.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(str(name) for name in options if name not in known)
        if unknown:
            raise ValueError(f"unknown option(s) {unknown}: the options are {known}")
        return cls(**options)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> DAFConfig:
        """A config from a JSON or YAML file that holds one mapping.

        Raises:
            ValueError: for a file that is not such a mapping, or for bad options in it.
            OSError: when the file cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a text file in UTF-8: {error}") from None
        try:
            options = json.loads(text) if str(path).endswith(".json") else yaml.safe_load(text)
        except (json.JSONDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"{path} is not a JSON or YAML file: {error}") from error
        if not isinstance(options, Mapping):
            raise ValueError(f"{path} must hold a mapping of options, not {type(options).__name__}")
        return cls.from_dict(options)

    @classmethod
    def build(cls, config: Any = None, **options: Any) -> DAFConfig:
        """A config from what users pass: a config, a mapping, a file's path, keyword options.

        Keyword options replace those of ``config``.

        Raises:
            ValueError: for anything else, and for unknown or bad options.
        """
        if config is None:
            return cls.from_dict(options)
        if isinstance(config, (str, os.PathLike)):
            config = cls.from_file(config)
        if isinstance(config, Mapping):
            return cls.from_dict({**config, **options})
        if not isinstance(config, cls):
            raise ValueError(
                f"config={config!r}: use a DAFConfig, a mapping of options, the path of a JSON or "
                "YAML file, or keyword options such as budget_mb=300"
            )
        return cls.from_dict({**config.to_dict(), **options})

    def to_dict(self) -> dict[str, Any]:
        """The options by name (``importance``, ``allocator`` and ``codec`` as they were given)."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def _documented(cls: type) -> str:
    """The docstring of a dataclass, with an Attributes section from the fields' help texts."""
    attributes = [
        textwrap.fill(
            f"{f.name}: {f.metadata['help']} Default: {f.default!r}.",
            width=92,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_on_hyphens=False,
        )
        for f in dataclasses.fields(cls)
    ]
    return "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Attributes:", *attributes])


DAFConfig.__doc__ = _documented(DAFConfig)


def check_budget(value: Any) -> float | str:
    """``value`` as a budget in MB: a positive number or inf (also as text), or one of the words.

    Raises:
        ValueError: naming the option and what is allowed.
    """
    message = (
        f"budget_mb={value!r}: use a positive number of MB (10^6 bytes), inf, {RECOMMENDED!r}, or "
        f"{AUTO!r}"
    )
    if isinstance(value, str) and value.strip().lower() in (RECOMMENDED, AUTO):
        return value.strip().lower()
    if isinstance(value, bool) or not isinstance(value, (Real, str)):
        raise ValueError(message)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(message) from None
    overflown = math.isinf(number) and isinstance(value, str) and any(map(str.isdigit, value))
    if not number > 0 or overflown:
        raise ValueError(message)
    return number


def _size(name: str, value: Any, zero: bool = False, endless: bool = False) -> float:
    """A number of MB, of more than 0 and finite unless these will do."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not (number > 0 or (zero and number == 0)) or (math.isinf(number) and not endless):
        least = "of at least 0" if zero else "above 0"
        raise ValueError(f"{name}={value!r}: use a number of MB (10^6 bytes) {least}")
    return number


def _number(name: str, value: Any) -> float:
    """A positive number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise ValueError(f"{name}={value!r}: use a number above 0")
    return float(value)


def _integer(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}={value!r}: use an integer of at least {least}")
    return int(value)


def _integers(name: str, values: Any, least: int) -> tuple[int, ...]:
    if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r}: use a list of integers")
    return tuple(_integer(name, value, least) for value in values)


def _patterns(name: str, values: Any) -> tuple[str, ...]:
    if isinstance(values, str):
        return (values,)
    if not isinstance(values, Iterable) or isinstance(values, Mapping):
        raise ValueError(f"{name}={values!r}: use a module name pattern or a list of them")
    values = tuple(values)
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name}={values!r}: use module name patterns such as '*.attention.*'")
    return values


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: use one of {list(allowed)}")
