"""What the examples' scripts share: options of DAF, a training run, its log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.memory import PeakMemoryCallback
from common.models import ModelError
from common.options import UsageError, require_least
from transformers import HfArgumentParser, Trainer

from daf_hf import BudgetError, DAFCallback, DAFConfig


@dataclass
class DAFArguments:
    """How saved activations are held: one of --budget_mb, --daf_config and --no_daf is needed."""

    budget_mb: str | None = field(
        default=None,
        metadata={
            "help": "Bytes for saved activations, in 10^6; `inf` is exact. Or `recommended`, or "
            "`auto`."
        },
    )
    importance: str | None = field(
        default=None,
        metadata={"help": "What decides where bits go: gradient, error, ..."},
    )
    codec: list[str] | None = field(
        default=None,
        metadata={
            "help": "Codecs to choose from: auto, group+uniform, path/to/file.py:object, ..."
        },
    )
    skip_padding: bool | None = field(
        default=None,
        metadata={
            "help": "Do not store rows of padding: true unless --daf_config says otherwise, as "
            "the loss is the model's own and its examples come first."
        },
    )
    daf_config: str | None = field(
        default=None,
        metadata={"help": "JSON or YAML file of options; those above override it."},
    )
    no_daf: bool = field(default=False, metadata={"help": "Train plainly."})


def parse(parser: HfArgumentParser, argv: list[str] | None) -> tuple[Any, ...]:
    """Parse the command line, the last part of which are `TrainingArguments`.

    Raises:
        UsageError: for options that these refuse, or that would end the run later on.
    """
    try:
        parsed = parser.parse_args_into_dataclasses(argv)
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    training = parsed[-1]
    require_least(training, per_device_train_batch_size=1, per_device_eval_batch_size=1)
    require_least(training, learning_rate=0)
    checkpoint = training.resume_from_checkpoint
    if checkpoint is not None and not Path(checkpoint).is_dir():
        raise UsageError(f"--resume_from_checkpoint {checkpoint}: no such folder")
    return parsed


def daf_config(args: DAFArguments) -> DAFConfig | None:
    """Return what the options ask for, or None for plain training.

    Raises:
        UsageError: if they ask for nothing, for opposites, or for something that DAF refuses.
    """
    options = {
        name: value
        for name in ("budget_mb", "importance", "codec", "skip_padding")
        if (value := getattr(args, name)) is not None
    }
    if args.no_daf:
        if options or args.daf_config:
            raise UsageError("--no_daf goes with no other DAF option")
        return None
    if args.budget_mb is None and args.daf_config is None:
        raise UsageError("choose one: --budget_mb MB, --daf_config FILE, or --no_daf")
    try:
        if args.daf_config:
            return replace(DAFConfig.from_file(args.daf_config), **options)
        return DAFConfig(**{"skip_padding": True, **options})
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error


def train(trainer: Trainer, daf: DAFCallback | None, memory: PeakMemoryCallback) -> None:
    """Train, and save the metrics, DAF's report (the other ranks' beside it) and the adapter."""
    metrics = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint).metrics
    metrics["train_model_rss_bytes"] = memory.baseline_bytes
    metrics["train_peak_rss_above_model_bytes"] = memory.above_baseline_bytes
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.save_model()
    if daf is not None and trainer.is_world_process_zero():
        folder = Path(trainer.args.output_dir or ".")
        for rank, report in enumerate(daf.reports):
            report.to_json(folder / (f"daf_report_{rank}.json" if rank else "daf_report.json"))


def show_daf_log() -> None:
    """Show what daf_hf is doing, such as a calibration that takes a while."""
    logger = logging.getLogger("daf_hf")
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)


def run(main: Callable[[], object], *errors: type[Exception]) -> None:
    """Run a script; what the user can mend ends it with a line in place of a traceback.

    Args:
        main: the script.
        errors: of its own, besides those of options and budgets.
    """
    show_daf_log()
    try:
        main()
    except (BudgetError, ModelError, UsageError, *errors) as error:
        sys.exit(f"error: {error}")
