r"""How far off are a trained language model's gradients, and how far were they predicted to be?

    python benchmarks/language_model_error.py --data_dir path/to/e2e_nlg --budgets 30 36 50

The model of ``examples/e2e_nlg`` (``make smollm2``, or ``--model_name_or_path``) with LoRA on the
query and value projections, and one batch of the training set. For each budget the gradient of the
adapters, at the start of training, is compared with plain training's on the same dropout; each is
preceded by a calibration of its own. ``--unmatched`` restores the rows of normalisations as they
are stored, without their own mean and size. ``measured`` is ``|g' - g| / |g|`` of all adapters
together.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from transformers import DataCollatorForSeq2Seq, set_seed

from daf_hf import compress_activations
from daf_hf.sites import SaveSite
from daf_hf.watching import Item

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "e2e_nlg"))
import run_e2e
from common.models import LoraArguments
from e2e_data import load_splits

Gradients = dict[str, torch.Tensor]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data_dir", required=True, help="folder of the E2E NLG csv files")
    parser.add_argument("--model_name_or_path", default="smollm2")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--budgets", type=float, nargs="+", default=[36.0], help="MB")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unmatched", action="store_true")
    return parser.parse_args(argv)


def load(options: argparse.Namespace) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model with its adapters, in training mode, and a batch."""
    set_seed(options.seed)
    arguments = run_e2e.ModelArguments(model_name_or_path=options.model_name_or_path)
    path, config, tokenizer = run_e2e.load_model_parts(arguments)
    model = run_e2e.build_model(arguments, LoraArguments(), path, config)
    pairs = load_splits(options.data_dir)["train"].shuffle(seed=options.seed)
    rows = run_e2e.tokenize(pairs.select(range(options.batch_size)), tokenizer, 256)
    batch = DataCollatorForSeq2Seq(tokenizer)(rows.to_list())
    return model.train(), dict(batch)


def gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor], seed: int) -> Gradients:
    """Of all that is trained."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    model(**batch).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def relative_error(found: Gradients, exact: Gradients) -> float:
    """Of all gradients as one vector."""
    change = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
    return math.sqrt(change / sum(float(g.square().sum()) for g in exact.values()))


def main(argv: list[str] | None = None) -> None:
    """Print a table."""
    options = parse(argv)
    if options.unmatched:
        SaveSite.matched = Item.matched = property(lambda self: False)  # type: ignore[assignment]
    model, batch = load(options)
    exact = gradients(model, batch, options.seed)
    print(f"batch {list(batch['input_ids'].shape)}")
    print(f"{'MB':>8} {'ratio':>7} {'predicted':>10} {'measured':>9}")
    for budget in options.budgets:
        with compress_activations(model, budget_mb=budget, skip_padding=True) as daf:
            found = gradients(model, batch, options.seed)
        report, error = daf.report, relative_error(found, exact)
        predicted = report.predicted_gradient_error
        print(f"{budget:8g} {report.ratio:7.1f} {predicted:10.3f} {error:9.3f}", flush=True)


if __name__ == "__main__":
    main()
