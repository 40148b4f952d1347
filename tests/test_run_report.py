"""A run in a picture."""

from __future__ import annotations

import base64
import json
import re
import sys

import pytest
from test_callbacks import trainer_of

from daf_hf import DAFCallback
from daf_hf.cli import main
from daf_hf.run_report import read_log

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with checkpoints of a run whose budget changes."""
    folder = tmp_path_factory.mktemp("run")
    callback = DAFCallback(budget_mb=0.3, budget_schedule=[(0.5, 0.2)])
    trainer_of(folder, [callback], save_strategy="steps", save_steps=2).train()
    return folder


def test_the_log_has_what_is_shown(run):
    rows = read_log(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["daf/budget_mb"] for row in rows] == [0.3, 0.3, 0.2, 0.2]
    assert all(0 < row["daf/held_mb"] <= row["daf/budget_mb"] for row in rows)
    assert all(row["loss"] > 0 and 0 < row["daf/mean_bits"] <= 8 for row in rows)
    assert read_log(run / "checkpoint-2" / "trainer_state.json") == rows[:2]


def test_picture_and_page(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    png, page = tmp_path / "a.png", tmp_path / "a.html"
    assert main(["report", str(run), "--png", str(png), "--html", str(page)]) == 0
    assert png.read_bytes().startswith(PNG)
    text = page.read_text(encoding="utf-8")
    (image,) = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert base64.b64decode(image) == png.read_bytes()
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert text.count("<tr>") == 5
    assert str(png) in capsys.readouterr().out


def test_the_files_are_in_the_run_by_default(run):
    pytest.importorskip("matplotlib")
    assert main(["report", str(run)]) == 0
    assert (run / "daf.png").is_file() and (run / "daf.html").is_file()


def test_mistakes_are_told_in_a_line(tmp_path, capsys, monkeypatch):
    def told(*arguments):
        assert main(["report", *map(str, arguments)]) == 1
        return capsys.readouterr().err

    assert "has no trainer_state.json" in told(tmp_path)
    state = tmp_path / "trainer_state.json"
    state.write_text("[]")
    assert "is not the state of a Trainer" in told(tmp_path)
    state.write_text(json.dumps({"log_history": [{"step": 1, "loss": 2.0}]}))
    assert "no steps that were logged with DAFCallback" in told(tmp_path)
    row = {"step": 1, "loss": 2.0, "daf/held_mb": 1.0, "daf/budget_mb": 2.0, "daf/mean_bits": 3.0}
    state.write_text(json.dumps({"log_history": [row]}))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "extra `plot`" in told(tmp_path)
