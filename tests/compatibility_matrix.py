"""A pytest plugin: the support matrix, docs/compatibility.md, from what its tests came to.

The tests of ``compatibility/test_checks.py`` put every case to the same checks; without
``--all-checks`` each to one of them, in turn, which takes minutes less. Others say what they show
with a mark, and may be several for one row::

    @pytest.mark.supports("Distributed", "DDP, two processes")
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import pytest

CHECKS = {
    "exact": "exact without a budget",
    "predicted": "error as predicted",
    "empty": "nothing left",
    "exception": "after an exception",
    "flat": "no growth",
}

HEAD = """# Compatibility

What daf_hf is tested with. `make compatibility` runs these tests and writes this page; nothing here
was written by hand. What says *not checked* was not run on the machine that wrote it, for the
reason given. All of it ran on a CPU; no GPU was at hand.

Each row was put to the same checks, those of `tests/compatibility/test_checks.py`:

- *exact without a budget*: with `budget_mb=inf`, gradients and weights after three steps are those
  of plain training, bit for bit;
- *error as predicted*: under a budget, the gradient's relative error is at most {off} times what
  the plan predicted (plus 0.01), and the budget was kept to;
- *nothing left*: after each step the arena, and all bookkeeping, is empty;
- *after an exception* in a forward and in a backward pass, no hook is left and plain training gives
  the gradients that it gives without daf_hf;
- *no growth*: resident memory stays the same over {steps} steps.
"""

ALONE = """
## By tests of their own

"""

Outcomes = Mapping[tuple[str, tuple[str, ...]], list[bool | str]]


def cell(outcomes: Iterable[bool | str]) -> str:
    """What the tests of one cell came to: each one passed, failed, or was skipped for a reason."""
    found = list(outcomes)
    if False in found:
        return "**no**"
    if True in found:
        return "yes"
    reasons = dict.fromkeys(str(reason) for reason in found)
    return "not checked: " + "; ".join(reasons) if reasons else "-"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def shown_by(tests: Iterable[str]) -> str:
    """The names of tests, one a line."""
    return "<br>".join(f"`{test}`" for test in tests)


def render(outcomes: Outcomes, off: float = 1.5, steps: int = 100) -> str:
    """The page.

    Args:
        outcomes: of ``("row", (area, name, check))`` and ``("shows", (area, name, test))``: True,
            False, or why it was skipped.
        off: what is allowed of the predicted error.
        steps: through which memory was watched.
    """
    rows: dict[str, dict[str, dict[str, list[bool | str]]]] = {}
    alone: dict[tuple[str, str], dict[str, list[bool | str]]] = {}
    for (kind, key), found in sorted(outcomes.items()):
        area, name, what = key
        if kind == "row":
            rows.setdefault(area, {}).setdefault(name, {}).setdefault(what, []).extend(found)
        else:
            test = what.split("[")[0]
            alone.setdefault((area, name), {}).setdefault(test, []).extend(found)
    text = HEAD.format(off=f"{off:g}", steps=steps)
    for area, names in rows.items():
        body = [
            [name, *(cell(checks.get(check, [])) for check in CHECKS)]
            for name, checks in names.items()
        ]
        text += f"\n## {area}\n\n" + table(["", *CHECKS.values()], body)
    if alone:
        body = [
            [area, name, cell(chain.from_iterable(tests.values())), shown_by(tests)]
            for (area, name), tests in alone.items()
        ]
        text += ALONE + table(["", "", "works", "shown by"], body)
    return text


def pytest_addoption(parser):
    group = parser.getgroup("compatibility")
    group.addoption("--write-matrix", metavar="FILE", help="write the support matrix to FILE")
    group.addoption("--all-checks", action="store_true", help="put each case to every check")
    group.addoption("--flat-steps", type=int, default=30, help="steps that are to take no memory")


def pytest_configure(config):
    config.addinivalue_line("markers", "supports(area, name): the row of the matrix it shows")
    if config.getoption("--write-matrix") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(MatrixWriter(config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("--all-checks"):
        return
    numbers, dropped = {}, []
    for item in items:
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")
        if hasattr(case, "area"):
            number = numbers.setdefault(case.name, len(numbers))
            check = list(CHECKS)[number % len(CHECKS)]
            if item.function.__name__ != f"test_{check}":
                dropped.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    for mark in item.iter_markers("supports"):
        item.user_properties.append(("shows", (*mark.args, item.nodeid.split("/")[-1])))


class MatrixWriter:
    """Collects outcomes, also from other processes, and writes them at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._path = Path(config.getoption("--write-matrix"))
        self._steps = config.getoption("--flat-steps")
        self._outcomes = defaultdict(list)

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and not (report.when == "setup" and report.skipped):
            return
        outcome = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else report.passed
        for kind, key in report.user_properties:
            if kind in ("row", "shows"):
                self._outcomes[kind, tuple(key)].append(outcome)

    def pytest_sessionfinish(self):
        self._path.write_text(render(self._outcomes, steps=self._steps), encoding="utf-8")
