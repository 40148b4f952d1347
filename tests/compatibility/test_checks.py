"""Every case, put to the same checks; the outcome is docs/compatibility.md (see conftest.py)."""

from __future__ import annotations

import gc
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import CASES, REAL, Case
from tiny import hooks_on_stack, nothing_held, same
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from daf_hf.gradient_error import GradientError
from daf_hf.session import Session

for path in sorted(Path(__file__).parent.glob("cases_*.py")):
    importlib.import_module(path.stem)

MB = 1e6
ALLOWED_GROWTH = 2 * MB


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request, record_property):
    """A case; those that lack the check that asks are skipped."""
    check = request.function.__name__.removeprefix("test_")
    record_property("row", (request.param.area, request.param.name, check))
    if check in request.param.lacks:
        pytest.skip(request.param.lacks[check])
    return request.param


@pytest.fixture
def budget(case, tmp_path, plain_bytes):
    """Bytes: the case's share of what plain training holds for backward."""
    if case.name not in plain_bytes:
        run = case.subject().train(
            1, tmp_path / "measured", {"budget_mb": math.inf, **case.options}
        )
        plain_bytes[case.name] = run.report.plain_bytes
    return case.share * plain_bytes[case.name]


@pytest.fixture(scope="module")
def plain_bytes():
    """By the name of a case."""
    return {}


def test_exact(case: Case, tmp_path):
    """Without a budget, gradients and weights are those of plain training, bit for bit."""
    plain = case.subject().train(3, tmp_path / "plain")
    daf = case.subject().train(3, tmp_path / "daf", {"budget_mb": math.inf, **case.options})
    assert plain.gradients
    assert same(daf.gradients, plain.gradients)
    assert same(daf.weights, plain.weights)


def test_predicted(case: Case, tmp_path, budget):
    """Under a budget, the gradient is off by no more than is predicted, and something is saved."""
    plain = case.subject().train(1, tmp_path / "plain").gradients
    subject = case.subject()
    run = subject.train(1, tmp_path / "daf", {"budget_mb": budget / MB, **REAL, **case.options})
    assert run.report.held_bytes_peak <= budget
    assert run.gradients.keys() == plain.keys()
    names = [n for n, p in subject.model.named_parameters() if p.requires_grad]
    reference = [plain.get(n) for n in names]
    change = [run.gradients[n] - plain[n] if n in plain else None for n in names]
    error = GradientError(subject.model).of(change, reference) ** 0.5
    assert error <= case.off * run.report.predicted_gradient_error + 0.01


def test_empty(case: Case, tmp_path, budget):
    """After each step nothing is held, and the budget was kept to."""

    def at_end(step, run):
        gc.collect()
        assert nothing_held(run.compressor)

    run = case.subject().train(
        4, tmp_path / "daf", {"budget_mb": budget / MB, **case.options}, at_end
    )
    assert run.report.held_bytes_peak <= budget
    assert run.report.budget_bytes == budget / MB * MB  # which may round


class Boom(Exception):
    """What a module raises."""


def called_in(model: nn.Module, run: Callable[[], Any]) -> set[str]:
    """Names of the modules whose forward is run."""
    names: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, args, name=name: names.add(name))
        for name, module in model.named_modules()
    ]
    run()
    for hook in hooks:
        hook.remove()
    return names


def last_trained(model: nn.Module, called: set[str]) -> nn.Module:
    """The last module with anything to train, and no such part, that is called.

    A frozen head may be read past its forward, and so may lists of parameters, or an adapter whose
    weights are added to its layer's.
    """
    within = {module for name, module in model.named_modules() if name in called}

    def trains(module: nn.Module) -> bool:
        return any(p.requires_grad for p in module.parameters())

    def callable_in(module: nn.Module) -> list[nn.Module]:
        inside = [found for child in module.children() for found in callable_in(child)]
        return inside or [module] * (module in within and trains(module))

    return callable_in(model)[-1]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception(case: Case, where, tmp_path, budget):
    """After an exception in the middle of a pass the model is as it was, and trains plainly."""
    fresh, runs = case.subject(), []
    called = called_in(fresh.model, lambda: runs.append(fresh.train(1, tmp_path / "plain")))
    (plain,) = runs
    subject = case.subject()
    last = last_trained(subject.model, called)
    handles = []

    def fail(module, args, output):
        if where == "forward":
            raise Boom
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                handles.append(leaf.register_hook(raise_boom))  # which may be a parameter

    def raise_boom(gradient):
        raise Boom

    handles.append(last.register_forward_hook(fail))
    with pytest.raises(Boom):
        subject.train(2, tmp_path / "daf", {"budget_mb": budget / MB, **case.options})
    for handle in handles:
        handle.remove()
    handles.clear()
    gc.collect()
    assert hooks_on_stack() is None
    assert Session.of(subject.model) is None
    # accelerate leaves a forward of its own behind under mixed precision.
    assert ("forward" in subject.model.__dict__) <= ("forward" in fresh.model.__dict__)
    subject.model.zero_grad(set_to_none=True)
    again = subject.train(1, tmp_path / "again")
    assert same(again.gradients, plain.gradients)


def test_flat(case: Case, tmp_path, budget, pytestconfig):
    """Many steps take no more memory than the first ones."""
    steps = pytestconfig.getoption("--flat-steps")
    process, resident = psutil.Process(), []

    def at_end(step, run):
        if step in (steps // 2, steps - 1):
            gc.collect()
            resident.append(process.memory_info().rss)

    options = {"budget_mb": budget / MB, "calibrate_at": (0,), **case.options}
    case.subject().train(steps, tmp_path / "daf", options, at_end)
    middle, end = resident
    assert end - middle <= ALLOWED_GROWTH
