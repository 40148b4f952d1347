r"""How well do importance metrics rank save sites, and how far is the allocator from the best plan?

    python benchmarks/ablations.py --data_dir path/to/glue --task sst2

Trains MiniLM with LoRA plainly for some steps, and takes the next batch. Then:

1. Each site alone is stored at a few bits, the rest exactly, in one forward and backward pass of
   the whole batch with dropout's seed fixed. The squared relative change of the gradients is the
   truth that every metric's cost (importance x distortion) is ranked against (Spearman). It is
   taken ``by_kind``, as the ``gradient`` metric takes it, and ``of_all`` as of one vector, in both
   cases of the adapters and of what is trained in full beside them, added up.
2. The options of all sites, with the costs of the ``gradient`` metric, are shared out under budgets
   of plain training's bytes over some ratios, by every allocator. ``bound`` is the cost of the
   best fractional plan (the linear relaxation on the options' convex hulls), which no plan beats.
3. The gradient of the batch under these budgets, with everything as it is by default and with one
   part in another way: derived tensors stored, one codec for all consumers, an importance or an
   allocator of other work. Its measured error, by kind as above, and, by the metric ``gradient``,
   what was predicted.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from torch import Tensor, nn

from daf_hf import compress_activations, importance
from daf_hf.allocation import ALLOCATORS, Option, lower_hull
from daf_hf.calibration import SMALL_SHARE
from daf_hf.gradient_error import MODULES_TO_SAVE
from daf_hf.sites import SaveSite

EXAMPLES = Path(__file__).parents[1] / "examples" / "glue"
NO_LIMIT_MB = 1e6
EXACT = Option(0, 0.0, None, None)

VARIANTS: dict[str, dict[str, Any]] = {
    "all of it": {},
    "derived tensors stored": {"derive": False},
    **{
        f"{codec} for all": {"codec": codec}
        for codec in ("group+uniform", "token+uniform", "channel+uniform", "group+normal")
    },
    **{
        f"importance {metric}": {"importance": metric}
        for metric in ("actnn", "gact", "error", "magnitude", "variance")
    },
    "ActNN's allocation": {"importance": "actnn", "allocator": "actnn"},
    "GACT's allocation": {"importance": "gact", "allocator": "gact"},
    "one width for all": {"allocator": "uniform"},
}

Row = dict[str, Any]
Gradients = dict[str, Tensor]


@dataclass
class Choices:
    """What a calibration found of one batch.

    Attributes:
        options: for each site that has a choice, its options, exact last.
        fixed_bytes: of everything else that is held.
        plain_bytes: what plain training holds.
        large: the sites whose importance is measured; small ones are not.
    """

    options: dict[SaveSite, list[Option]]
    fixed_bytes: int
    plain_bytes: int
    large: list[SaveSite]

    def at(self, site: SaveSite, bits: int) -> Option:
        """The site's best option of a width."""
        return min((o for o in self.options[site] if o.bits == bits), key=lambda o: o.cost)


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> Gradients:
    """Gradients by parameter, with dropout as in every other call."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    model(**batch).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def squared_error(measured: Gradients, exact: Gradients, by_kind: bool) -> float:
    """Squared relative change: of adapters, and of what is trained in full beside them, added.

    Args:
        measured: gradients by parameter.
        exact: the same without any quantization.
        by_kind: parameters of one kind (the same in every layer) count relative to their own norm,
            and kinds by their number of elements, as in the ``gradient`` metric; else relative to
            all.
    """
    groups: dict[bool, dict[str, list[str]]] = {}
    for name in exact:
        kind = re.sub(r"\.\d+(?=\.)", "", name) if by_kind else ""
        groups.setdefault(MODULES_TO_SAVE in name, {}).setdefault(kind, []).append(name)
    return sum(_weighted(kinds.values(), measured, exact) for kinds in groups.values())


def _weighted(kinds: Iterable[list[str]], measured: Gradients, exact: Gradients) -> float:
    error = elements = 0.0
    for names in kinds:
        norm = sum(float(exact[name].square().sum()) for name in names)
        if norm > 0:
            count = sum(exact[name].numel() for name in names)
            change = sum(float((measured[n] - exact[n]).square().sum()) for n in names)
            error += count * change / norm
            elements += count
    return error / elements if elements else 0.0


def calibrate(daf: compress_activations, model: nn.Module, batch: dict[str, Tensor]) -> Choices:
    """Measure importances on a batch, and collect the options that the allocator is given."""
    session = daf._session
    gradients(model, batch)
    last = session._last_pass
    if last is None or last.plan is None or not last.plan.options:
        raise SystemExit("nothing was measured: the calibration's warning says why")
    choices = session.planner.choices(last.key, last.plan.batch)
    sizes = {site: site.nbytes for site in choices.options}
    average = sum(sizes.values()) / len(sizes)
    large = [site for site, size in sizes.items() if size >= SMALL_SHARE * average]
    return Choices(choices.options, choices.fixed_bytes, daf.report.plain_bytes, large)


def single_site_errors(
    model: nn.Module, batch: dict[str, Tensor], widths: Sequence[int]
) -> tuple[dict[tuple[str, int], tuple[float, float]], Choices]:
    """The truth by site and width (by kind, and of all), and the choices under ``gradient``."""
    with compress_activations(model, budget_mb=NO_LIMIT_MB, calibrate_at=(0,)) as daf:
        choices = calibrate(daf, model, batch)
        plan = daf._session.last_plan
        assert plan is not None
        alone = dict.fromkeys(choices.options, EXACT)
        plan.options = alone
        exact = gradients(model, batch)
        errors = {}
        for site in choices.large:
            for bits in widths:
                plan.options = {**alone, site: choices.at(site, bits)}
                found = gradients(model, batch)
                by_kind, of_all = (squared_error(found, exact, kinds) for kinds in (True, False))
                errors[site.name, bits] = by_kind, of_all
    return errors, choices


def rank_correlations(
    model: nn.Module, batch: dict[str, Tensor], metrics: Sequence[str], widths: Sequence[int]
) -> tuple[list[Row], Choices]:
    """Spearman's correlation of every metric's costs with the truth, by width."""
    errors, choices = single_site_errors(model, batch, widths)
    rows = []
    for metric in metrics:
        found = choices
        if metric != "gradient":
            with compress_activations(
                model, budget_mb=NO_LIMIT_MB, importance=metric, calibrate_at=(0,)
            ) as daf:
                found = calibrate(daf, model, batch)
        for bits in widths:
            known = [site for site in found.large if (site.name, bits) in errors]
            costs = [found.at(site, bits).cost for site in known]
            truths = zip(*(errors[site.name, bits] for site in known), strict=True)
            by_kind, of_all = (float(spearmanr(costs, truth)[0]) for truth in truths)
            rows.append(
                {"metric": metric, "bits": bits, "sites": len(known), "by_kind": by_kind,
                 "of_all": of_all}
            )  # fmt: skip
    return rows, choices


def relaxed_cost(sites: Sequence[Sequence[Option]], budget: float) -> float:
    """Cost of the best fractional plan: hull edges by slope, the last one in part.

    A lower bound of what any plan of that budget costs; inf where even the smallest do not fit.
    """
    hulls = [lower_hull(options) for options in sites]
    room = budget - sum(hull[0].nbytes for hull in hulls)
    cost = sum(hull[0].cost for hull in hulls)
    if room < 0:
        return math.inf
    edges = [(b.nbytes - a.nbytes, a.cost - b.cost) for hull in hulls for a, b in pairwise(hull)]
    for nbytes, gain in sorted(edges, key=lambda edge: -edge[1] / edge[0]):
        share = min(1.0, room / nbytes)
        cost -= share * gain
        room -= share * nbytes
    return cost


def allocator_gaps(
    choices: Choices, allocators: Sequence[str], ratios: Sequence[float]
) -> list[Row]:
    """Cost of every allocator's plan, and by how much of the bound it is above that."""
    sites = list(choices.options.values())
    rows = []
    for ratio in ratios:
        budget = choices.plain_bytes / ratio - choices.fixed_bytes
        bound = relaxed_cost(sites, budget)
        for name in allocators:
            plan = ALLOCATORS.resolve(name)(sites, budget)
            cost = sum(option.cost for option in plan)
            fits = sum(option.nbytes for option in plan) <= budget
            above = cost / bound - 1 if fits and 0 < bound < math.inf else None
            rows.append(
                {"ratio": ratio, "allocator": name, "error": math.sqrt(cost), "fits": fits,
                 "bound": math.sqrt(bound), "above_bound": above}
            )  # fmt: skip
    return rows


def variants(
    model: nn.Module, batch: dict[str, Tensor], plain_bytes: int, ratios: Sequence[float]
) -> list[Row]:
    """What each part is worth: the gradient's error without it, in the same bytes."""
    exact = gradients(model, batch)
    rows = []
    for ratio in ratios:
        for name, options in VARIANTS.items():
            with compress_activations(
                model, budget_mb=plain_bytes / ratio / 1e6, on_overflow="spill",
                calibrate_at=(0,), **options,
            ) as daf:  # fmt: skip
                found = gradients(model, batch)
                report = daf.report
            rows.append(
                {"ratio": ratio, "variant": name, "mean_bits": report.mean_bits,
                 "spilled": report.counts.get("spilled", 0),
                 "predicted": report.predicted_gradient_error,
                 "measured": math.sqrt(squared_error(found, exact, True))}
            )  # fmt: skip
    return rows


def training(
    options: argparse.Namespace,
) -> tuple[nn.Module, torch.optim.Optimizer, Iterator[dict[str, Tensor]]]:
    """A model after some steps of plain training, its optimizer, and the batches to come."""
    sys.path.insert(0, str(EXAMPLES))
    import glue_model
    import run_glue
    from torch.utils.data import DataLoader
    from transformers import DataCollatorWithPadding, set_seed

    # transformers' own use of a name that it has deprecated.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    set_seed(options.seed)
    task = run_glue.get_task(options.task)
    name = glue_model.ModelArguments(options.model)
    lora = glue_model.LoraArguments(modules_to_save=options.modules_to_save)
    config = glue_model.build_config(name, task)
    tokenizer = glue_model.build_tokenizer(name, config)
    data_dir = str(options.data_dir) if options.data_dir else None
    data = run_glue.DataArguments(options.task, data_dir)
    split = run_glue.load_tokenized(task, data, tokenizer, options.max_seq_length)["train"]
    loader = DataLoader(
        split.rename_column("label", "labels"),  # type: ignore[arg-type]
        batch_size=options.batch_size,
        shuffle=True,
        collate_fn=DataCollatorWithPadding(tokenizer),
    )
    model = glue_model.build_model(name, lora, config).train()
    optimizer = torch.optim.AdamW(
        (p for p in model.parameters() if p.requires_grad), lr=options.learning_rate
    )
    if options.steps >= len(loader):
        raise SystemExit(f"--steps {options.steps}: one epoch has {len(loader)} batches; use fewer")
    batches = map(dict, loader)
    for batch in islice(batches, options.steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, batches


def trained(options: argparse.Namespace) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model after some steps of plain training, and the batch that would come next."""
    model, _, batches = training(options)
    return model, next(batches)


def print_table(title: str, rows: Sequence[Row]) -> None:
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(highlight=False).print(table)


def training_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options of :func:`training`."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--task", default="sst2")
    add("--data_dir", type=Path, help="GLUE's original files; else the Hub")
    add("--model", default="minilm")
    add("--modules_to_save", nargs="+", default=["classifier", "pooler"])
    add("--max_seq_length", type=int, default=64)
    add("--batch_size", type=int, default=32)
    add("--learning_rate", type=float, default=1e-3)
    add("--steps", type=int, default=20, help="of plain training before anything is measured")
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="write the rows there")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = training_parser(__doc__.splitlines()[0])  # type: ignore[union-attr]
    add = parser.add_argument
    names = importance.METRICS.names()
    add("--metrics", nargs="+", choices=names, default=names)
    add("--bits", nargs="+", type=int, choices=(1, 2, 3, 4, 5, 6, 8), default=[1, 2, 4])
    add("--allocators", nargs="+", choices=ALLOCATORS.names(), default=ALLOCATORS.names())
    add("--ratios", nargs="+", type=float, default=[10, 20, 30, 40])
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    model, batch = trained(options)
    correlations, choices = rank_correlations(model, batch, options.metrics, options.bits)
    print_table("Rank correlation with the measured gradient error", correlations)
    gaps = allocator_gaps(choices, options.allocators, options.ratios)
    print_table("Predicted gradient error by allocator", gaps)
    found = variants(model, batch, choices.plain_bytes, options.ratios)
    print_table("Gradient error, one part in another way", found)
    if options.json:
        rows = {"correlations": correlations, "allocators": gaps, "variants": found}
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
