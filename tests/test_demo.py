"""The demo's comparison: what it concludes from two runs, and how it starts them."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

GLUE = Path(__file__).parents[1] / "examples" / "glue"


@pytest.fixture(scope="module")
def demo():
    sys.path.insert(0, str(GLUE))
    yield importlib.import_module("demo")
    sys.path.remove(str(GLUE))


@pytest.fixture
def run(demo):
    def make(accuracy):
        return demo.Run({"eval_accuracy": accuracy}, [], {"ratio": 13.6})

    return make


def test_the_difference_is_that_of_the_accuracies_shown(demo, run):
    plain, daf = run(0.99271), run(0.98646)  # 0.6 points apart, but shown as 99.3 and 98.6
    assert demo.verdict(plain, daf) == (
        True,
        "13.6x less activation memory, -0.7 points of accuracy against plain training",
    )


@pytest.mark.parametrize(
    ("plain", "daf", "good", "words"),
    [
        (0.990, 0.960, True, "-3.0 points"),
        (0.990, 0.959, False, "the budget cost 3.1 points"),
        (0.799, 0.900, False, "plain training reached only 79.9%"),
        (0.950, 0.955, True, "+0.5 points"),
    ],
)
def test_verdict(demo, run, plain, daf, good, words):
    held, text = demo.verdict(run(plain), run(daf))
    assert held is good
    assert words in text


@pytest.mark.parametrize(("chosen", "used"), [(None, "passive"), ("active", "active")])
def test_idle_threads_do_not_spin_unless_told_to(demo, tmp_path, monkeypatch, chosen, used):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    environments = []

    def start(command, *, check, env):
        environments.append(env)
        folder = Path(command[command.index("--output_dir") + 1])
        folder.mkdir()
        (folder / "trainer_state.json").write_text('{"log_history": [{"step": 1, "loss": "0.5"}]}')
        (folder / "all_results.json").write_text(json.dumps({"eval_accuracy": 0.5}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(demo.subprocess, "run", start)
    options = argparse.Namespace(output_dir=tmp_path, max_steps=1, seed=0)
    assert demo.train(options, tmp_path, "plain", "--no_daf").points == 50.0
    assert [env["OMP_WAIT_POLICY"] for env in environments] == [used]
