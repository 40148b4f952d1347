"""Tables and pictures of benchmarks/accuracy.py, from made-up runs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from glue_runs import SITES, daf_report, leave, results
from matplotlib import image

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """The folder of the scripts, for import."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture
def accuracy():
    return importlib.import_module("accuracy")


@pytest.fixture
def report():
    return importlib.import_module("accuracy_report")


@pytest.fixture
def plots():
    return importlib.import_module("accuracy_plots")


# --- tables ----------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path):
    """Three seeds of plain training, two of daf@20, all with their bytes counted."""
    for seed, plain, daf in ((1, 0.80, 0.79), (2, 0.82, 0.83), (3, 0.90, None)):
        leave(tmp_path, "mrpc", "plain", seed, results("mrpc", plain, 200e6))
        counted = daf_report(300e6 + 10e6 * seed, 300e6 + 10e6 * seed, 0.0, 0.0)
        leave(tmp_path, "mrpc", "exact", seed, results("mrpc", plain), counted)
        if daf is not None:
            held = daf_report(15e6 + seed * 1e6, 310e6, error=0.1 * seed, bits=2.0)
            leave(tmp_path, "mrpc", "daf@20", seed, results("mrpc", daf), held)
    return tmp_path


def test_rows_have_means_deviations_and_paired_differences(report, made):
    runs, unfinished = report.read_runs(made)
    assert unfinished == []
    plain, exact, daf = report.build_rows(runs)
    assert [row.setting for row in (plain, exact, daf)] == ["plain", "exact", "daf@20"]
    assert plain.mean == pytest.approx(84.0)
    assert plain.sd == pytest.approx(28**0.5)  # deviations -4, -2, 6 over n - 1 = 2
    assert plain.difference is None and plain.differences == {}
    assert (plain.held_mb, plain.plain_mb, plain.ratio) == (320.0, 320.0, 1.0)
    assert plain.peak_rss_mb == 200.0 and plain.predicted_error is None
    assert exact.difference == 0.0 and exact.mean_bits is None and exact.ratio == 1.0
    assert daf.metric == "f1" and daf.others == pytest.approx({"accuracy": 81.0})
    # The third seed has no pair: -1 and +1, not 81 - 84.
    assert daf.differences == pytest.approx({1: -1.0, 2: 1.0})
    assert daf.difference == pytest.approx(0.0, abs=1e-9)
    assert daf.difference_sd == pytest.approx(2**0.5)
    assert daf.held_mb == pytest.approx(16.5)
    assert daf.ratio == pytest.approx((310 / 16 + 310 / 17) / 2)
    assert daf.predicted_error == pytest.approx(0.15) and daf.mean_bits == 2.0


def test_one_seed_has_no_deviation_and_an_error_may_be_unknown(report, tmp_path):
    leave(tmp_path, "sst2", "gact@8", 1, results("sst2", 0.7), daf_report(50e6, error=None))
    (row,) = report.build_rows(report.read_runs(tmp_path)[0])
    assert (row.sd, row.difference, row.predicted_error) == (None, None, None)
    assert report.cells(row)[4] == "-"


def test_tables_are_written(accuracy, report, made, capsys):
    (made / "mrpc/daf@20/3").mkdir()
    record = {"task": "mrpc", "setting": "daf@20", "seed": 3}
    (made / "mrpc/daf@20/3/run.json").write_text(json.dumps(record))
    assert accuracy.main(["--report_only", "--out", str(made)]) == 0
    text = (made / "accuracy.md").read_text()
    daf = "| mrpc | daf@20 | f1 / accuracy | 81.0 / 81.0 | 2.8 | 2 | +0.0 | 1.4 | 18.8 | 16.5 |"
    assert daf in text
    assert "| mrpc | daf@20 | 1: 79.0, 2: 83.0 |" in text
    assert text.endswith("Not finished:\n\n- mrpc daf@20 seed 3\n")
    rows = json.loads((made / "accuracy.json").read_text())
    assert [row["setting"] for row in rows] == ["plain", "exact", "daf@20"]
    assert rows[2]["scores"] == pytest.approx({"1": 79.0, "2": 83.0})
    assert "daf@20" in capsys.readouterr().out
    for name in ("accuracy.png", "bits-mrpc.png"):
        height, width, _ = image.imread(made / name).shape
        assert height > 100 and width > 100


def test_nothing_to_report_is_said(accuracy, tmp_path, capsys):
    assert accuracy.main(["--report_only", "--out", str(tmp_path)]) == 1
    assert "no finished run" in " ".join(capsys.readouterr().out.split())


# --- pictures --------------------------------------------------------------------------------


def test_bits_of_sites_by_setting(report, plots, made):
    more = [{**SITES[0], "bits": 8}, SITES[1]]
    leave(made, "mrpc", "fixed8@4", 1, results("mrpc", 0.8), daf_report(80e6, sites=more))
    sites, settings, levels = plots.site_bits(report.read_runs(made)[0])
    assert sites == ["m.a/0 A.self", "m.a/1 B.self", "m.b/0 C.self"]  # small ones are left out
    assert settings == ["fixed8@4", "daf@20"]  # exact has nothing to show
    assert levels[0].tolist() == [8, 3]
    assert levels[1].tolist() == [plots.EXACTLY, plots.EXACTLY]
    assert levels[2, 1] == plots.NOT_STORED and levels[2, 0] != levels[2, 0]


def test_no_heat_map_without_a_budget(report, plots, made):
    runs = [run for run in report.read_runs(made)[0] if run.setting.ratio is None]
    assert plots.plot_bits(runs, made / "bits.png") == []
    assert not (made / "bits.png").exists()


def test_one_panel_a_task_with_memory_on_a_logarithmic_axis(report, plots, made, monkeypatch):
    leave(made, "sst2", "plain", 1, results("sst2", 0.9))  # its bytes are unknown: not drawn
    leave(made, "rte", "daf@20", 1, results("sst2", 0.6), daf_report(20e6))
    drawn = []
    monkeypatch.setattr(plots.pyplot, "close", drawn.append)
    plots.plot_accuracy(report.build_rows(report.read_runs(made)[0]), made / "a.png")
    (figure,) = drawn
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["", "mrpc", "rte"]
    _, mrpc, _ = figure.axes
    assert mrpc.get_xscale() == "log"
    points = {tuple(line.get_xdata()) for line in mrpc.lines}
    assert {(320.0,), (16.5,)} <= points
