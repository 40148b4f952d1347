"""``daf-hf``: the command line.

``daf-hf plan MODEL`` tells what budgets would do to a model on a batch, without training; see
:func:`daf_hf.plan`. ``daf-hf budget PID MB`` changes the budget of a training that goes on, and
``daf-hf report RUN`` draws what a training has held, and its loss.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from ._version import __version__
from .budget_plan import BudgetPlan
from .cli_arguments import UsageError, add_model_arguments
from .config import DAFConfig, check_budget
from .control import ControlError, ask
from .forecast import plan
from .plan_plot import check_plot, save_plot
from .run_report import save_report


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="daf-hf", description="Saved activations within a memory budget."
    )
    parser.add_argument("--version", action="version", version=f"daf-hf {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_plan(
        commands.add_parser(
            "plan",
            help="what budgets would do to a model, without training",
            description="Calibrate once on a batch, and tell what budgets would do: bytes, ratio, "
            "bits, predicted error of the gradient.",
        )
    )
    _add_budget(commands.add_parser("budget", help="change the budget of a training that goes on"))
    _add_report(
        commands.add_parser("report", help="draw budget, held bytes, mean bits and loss of a run")
    )
    return parser


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="output folder of the Trainer")
    parser.add_argument("--png", metavar="FILE", help="the picture (RUN/daf.png)")
    parser.add_argument("--html", metavar="FILE", help="a page of its own (RUN/daf.html)")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    """``daf-hf report``."""
    run = Path(options.run_folder)
    folder = run if run.is_dir() else run.parent
    png, page = options.png or folder / "daf.png", options.html or folder / "daf.html"
    try:
        save_report(run, png, page)
    except ImportError as error:
        message = f"report needs matplotlib, from the extra `plot` of daf-hf ({error})"
        raise UsageError(message) from error
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    print(f"wrote {png} and {page}")


def _add_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pid", type=int, metavar="PID", help="the process that trains")
    parser.add_argument(
        "budget_mb", metavar="MB", help="in 10^6 bytes; also auto, recommended, inf"
    )
    parser.set_defaults(run=_budget)


def _budget(options: argparse.Namespace) -> None:
    """``daf-hf budget``."""
    try:
        check_budget(options.budget_mb)
        print(ask(options.pid, options.budget_mb))
    except (ControlError, ValueError) as error:
        raise UsageError(str(error)) from error


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("plan")
    group.add_argument("--budgets", nargs="+", metavar="MB", help="of the table, in 10^6 bytes")
    group.add_argument("--daf_config", metavar="FILE", help="JSON or YAML file of DAF's options")
    group.add_argument(
        "--calibration_batch", type=int, metavar="N", help="examples that are probed (4)"
    )
    group.add_argument("--json", metavar="FILE", help="write all figures there")
    group.add_argument("--plot", metavar="FILE", help="draw budget against error there")
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> None:
    """``daf-hf plan``. What can go wrong is looked at before the minutes of a calibration."""
    from .cli_model import build_batch, build_model  # here: they take seconds to load

    config = _daf_config(options)
    _check_outputs(options)
    with warnings.catch_warnings():
        # PEFT's use of a name that transformers has deprecated.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        model, model_config, task = build_model(options)
    batch = build_batch(options, model_config, task)
    print(
        f"{options.model} ({model_config.model_type}, {task}), {options.batch_size} x "
        f"{options.seq_len} tokens: calibrating, which takes several steps' time",
        file=sys.stderr,
    )
    try:
        found = plan(model, batch, config, budgets=options.budgets)
    except (RuntimeError, ValueError) as error:
        raise UsageError(str(error)) from error
    print(found)
    _write(found, options)


def _daf_config(options: argparse.Namespace) -> DAFConfig:
    given = options.calibration_batch
    try:
        return DAFConfig.build(
            options.daf_config, **({} if given is None else {"calibration_batch": given})
        )
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error


def _check_outputs(options: argparse.Namespace) -> None:
    for option in ("json", "plot"):
        path = getattr(options, option)
        if path and not Path(path).parent.is_dir():
            raise UsageError(f"--{option} {path}: there is no folder {Path(path).parent}")
    if options.plot:
        try:
            check_plot(options.plot)
        except ImportError as error:
            raise UsageError(
                f"--plot needs matplotlib, from the extra `plot` of daf-hf ({error})"
            ) from error
        except ValueError as error:
            raise UsageError(f"--plot {error}") from error


def _write(found: BudgetPlan, options: argparse.Namespace) -> None:
    try:
        if options.json:
            found.to_json(options.json)
        if options.plot:
            save_plot(found, options.plot)
    except OSError as error:
        raise UsageError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
