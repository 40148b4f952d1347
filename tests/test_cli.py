"""``daf-hf`` on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from test_cli_model import SMALL, config_folder

from daf_hf import __version__
from daf_hf.cli import main

BATCH = ["--batch_size", "4", "--seq_len", "16", "--calibration_batch", "2"]


def run_plan(*arguments):
    return main(["plan", *map(str, arguments), *BATCH])


@pytest.mark.parametrize("kind", ["roberta", "gpt2", "llama"])
def test_plan_from_a_configuration(tmp_path, capsys, kind):
    folder = config_folder(tmp_path, kind)
    assert run_plan(folder, "--from_config", "--json", tmp_path / "plan.json") == 0
    out, err = capsys.readouterr()
    assert "4 x 16 tokens" in err and kind in err
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["recommended_bytes"] < found["plain_bytes"]
    assert f"budget_mb={found['recommended_bytes'] / 1e6:g}" in out
    assert {"least", "recommended", "plain"} <= {
        m for row in found["budgets"] for m in row["marks"]
    }
    assert any("lora_A" in site["name"] for site in found["sites"])


def test_plan_from_a_model_type(tmp_path, capsys):
    overrides = [f"{key}={value}" for key, value in SMALL["llama"].items()]
    arguments = ["llama", "--from_config", "--dtype", "bfloat16", "--budgets", "0.05", "1e-3"]
    path = tmp_path / "plan.json"
    assert run_plan(*arguments, "--json", path, "--config_overrides", *overrides) == 0
    found = json.loads(path.read_text())
    rows = {row["budget_bytes"]: row for row in found["budgets"]}
    assert rows[50_000]["planned_bytes"] <= 50_000 and rows[1000]["planned_bytes"] is None
    assert any(site["dtype"] == "bfloat16" for site in found["sites"])


def test_options_of_daf_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "daf.json").write_text(json.dumps({"budget_mb": 0.05, "bits": [2, 4]}))
    arguments = ["--daf_config", tmp_path / "daf.json", "--plot", tmp_path / "plan.png"]
    folder = config_folder(tmp_path, "roberta")
    assert run_plan(folder, "--from_config", *arguments, "--json", tmp_path / "plan.json") == 0
    assert (tmp_path / "plan.png").stat().st_size > 1000
    found = json.loads((tmp_path / "plan.json").read_text())
    assert {site["bits"] for site in found["sites"]} <= {2, 4, None}
    assert [row["budget_bytes"] for row in found["budgets"] if "asked" in row["marks"]] == [50_000]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budgets", "much"], "budget_mb='much'"),
        (["--plot", "plan.xyz"], "--plot plan.xyz: use a name"),
        (["--json", "no/such/folder/plan.json"], "there is no folder no/such/folder"),
        (["--daf_config", "nowhere.yaml"], "nowhere.yaml"),
        (["--calibration_batch", "0"], "calibration_batch=0"),
        (["--seq_len", "4000"], "--seq_len 4000: the model takes at most"),
        (["--target_modules", "nothing"], "--target_modules, of .*query"),
    ],
)
def test_mistakes_are_told_in_a_line(tmp_path, capsys, arguments, message):
    folder = config_folder(tmp_path, "roberta")
    assert main(["plan", str(folder), "--from_config", *BATCH, *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match(rf"error: .*{message}", err.splitlines()[-1])


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run_plan(config_folder(tmp_path, "roberta"), "--from_config", "--plot", "a.png") == 1
    assert "extra `plot`" in capsys.readouterr().err


def test_what_needs_no_model_loads_no_libraries_of_models():
    code = "import sys, daf_hf.cli; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_help_and_version(capsys):
    for arguments, text in ((["--help"], "plan"), (["plan", "--help"], "--from_config")):
        with pytest.raises(SystemExit) as done:
            main(arguments)
        assert done.value.code == 0 and text in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"daf-hf {__version__}\n"
    with pytest.raises(SystemExit) as done:
        main([])
    assert done.value.code == 2
