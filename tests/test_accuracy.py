"""benchmarks/accuracy.py: settings, what is run and what is not, and a whole run."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")
from glue_runs import daf_report, results
from transformers import BertConfig, BertForSequenceClassification

from daf_hf import DAFConfig

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """The folders of the scripts, for import."""
    folders = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "glue")]
    sys.path[:0] = folders
    yield
    for folder in folders:
        sys.path.remove(folder)


@pytest.fixture
def accuracy():
    return importlib.import_module("accuracy")


@pytest.fixture
def settings():
    return importlib.import_module("accuracy_settings")


@pytest.fixture
def report():
    return importlib.import_module("accuracy_report")


# --- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("plain", "plain", None),
        ("exact", "exact", {"budget_mb": "inf"}),
        ("daf", "daf@20", {"budget_mb": 20.0}),
        ("daf@30", "daf@30", {"budget_mb": 13.333}),
        ("daf@2.5", "daf@2.5", {"budget_mb": 160.0}),
        ("fixed8", "fixed8@4", {"budget_mb": 100.0, "allocator": "fixed8"}),
        ("uniform4", "uniform4@8", {"budget_mb": 50.0, "allocator": "uniform", "bits": [4]}),
        ("uniform2@20", "uniform2@20", {"budget_mb": 20.0, "allocator": "uniform", "bits": [2]}),
        (
            "actnn@20",
            "actnn@20",
            {
                "budget_mb": 20.0,
                "importance": "actnn",
                "allocator": "actnn",
                "codec": "group+uniform",
            },
        ),
        (
            "gact",
            "gact@8",
            {
                "budget_mb": 50.0,
                "importance": "gact",
                "allocator": "gact",
                "codec": "group+uniform",
            },
        ),
    ],
)
def test_a_setting_is_options_and_a_part_of_plain_bytes(settings, text, name, expected):
    setting = settings.Setting.parse(text)
    assert setting.name == name
    options = setting.daf_options(400e6)
    if setting.ratio is not None:
        assert options.pop("skip_padding") is True
    assert options == expected
    assert settings.Setting.parse(setting.name) == setting


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adam", "setting 'adam': use one of plain, exact, "),
        ("plain@3", "plain has no budget; use 'plain'"),
        ("daf@", "use a ratio above 1, such as daf@20"),
        ("daf@1", "use a ratio above 1"),
        ("daf@-3", "use a ratio above 1"),
        ("daf@inf", "use a ratio above 1"),
    ],
)
def test_other_settings_are_refused(settings, text, message):
    with pytest.raises(ValueError, match=message):
        settings.Setting.parse(text)


def test_the_options_of_every_setting_are_options_of_daf(settings):
    for policy in settings.POLICIES:
        options = settings.Setting.parse(policy).daf_options(400e6) or {}
        assert DAFConfig.from_dict(options).budget_mb > 0


def test_options_that_daf_refuses_are_refused_before_anything_is_trained(
    accuracy, settings, monkeypatch, capsys
):
    monkeypatch.setitem(settings.POLICIES, "daf", settings.Policy(20, {"bits": [9]}))
    with pytest.raises(SystemExit):
        accuracy.parse(["--settings", "daf@20"])
    assert "bits=[9]: use a non-empty selection" in capsys.readouterr().err


def test_scores_are_those_of_the_example(settings):
    metrics = importlib.import_module("metrics")
    assert {task: set(names) for task, names in settings.SCORES.items()} == {
        task: set(names) for task, names in metrics.TASK_METRICS.items()
    } | {"stsb": {"spearmanr"}}


# --- what is run -----------------------------------------------------------------------------


class Trainings:
    """Stands for run_glue.py's process: leaves the files of a run, or fails."""

    def __init__(self):
        self.made = []
        self.failing = ()

    def __call__(self, command, stdout, **options):
        values = dict(pairwise(command))
        folder = Path(values["--output_dir"])
        self.made.append("/".join(folder.parts[-3:]))
        if self.made[-1] in self.failing:
            stdout.write("error: no room\n")
            return SimpleNamespace(returncode=1)
        (folder / "all_results.json").write_text(json.dumps(results(folder.parts[-3], 0.8)))
        if "--daf_config" in values:
            options = json.loads(Path(values["--daf_config"]).read_text(encoding="utf-8"))
            held = min(float(options["budget_mb"]) * 1e6, 400e6)
            (folder / "daf_report.json").write_text(json.dumps(daf_report(held)))
        else:
            assert values["--no_daf"] == "True"
        return SimpleNamespace(returncode=0)


@pytest.fixture
def trainings(monkeypatch, accuracy):
    stand_in = Trainings()
    monkeypatch.setattr(accuracy.subprocess, "run", stand_in)
    monkeypatch.setattr(accuracy, "plot_accuracy", lambda rows, path: path)  # they take a while
    monkeypatch.setattr(accuracy, "plot_bits", lambda runs, path: [path])
    return stand_in


def small(out, *more):
    return ["--settings", "plain", "daf@20", "--tasks", "sst2", "mrpc", "--seeds", "1", "2",
            "--out", str(out), *more]  # fmt: skip


def test_bytes_are_counted_before_budgets_need_them(accuracy, trainings, tmp_path):
    assert accuracy.main(small(tmp_path)) == 0
    assert trainings.made == [
        "sst2/exact/1", "mrpc/exact/1",
        "sst2/plain/1", "sst2/daf@20/1", "mrpc/plain/1", "mrpc/daf@20/1",
        "sst2/exact/2", "mrpc/exact/2",
        "sst2/plain/2", "sst2/daf@20/2", "mrpc/plain/2", "mrpc/daf@20/2",
    ]  # fmt: skip
    options = json.loads((tmp_path / "sst2/daf@20/2/daf.json").read_text())
    assert options == {"budget_mb": 20.0, "skip_padding": True}


def test_plain_training_alone_needs_nothing_counted(accuracy, trainings, tmp_path):
    command = ["--settings", "plain", "--tasks", "sst2", "--seeds", "3", "--out", str(tmp_path)]
    assert accuracy.main(command) == 0
    assert trainings.made == ["sst2/plain/3"]


def test_what_is_finished_is_not_repeated(accuracy, trainings, tmp_path):
    accuracy.main(small(tmp_path))
    # One was interrupted between training and scoring, another while it wrote.
    (tmp_path / "sst2/daf@20/1/all_results.json").write_text('{"train_runtime": 3}')
    (tmp_path / "mrpc/plain/2/all_results.json").write_text('{"train_')
    trainings.made.clear()
    assert accuracy.main(small(tmp_path)) == 0
    assert trainings.made == ["sst2/daf@20/1", "mrpc/plain/2"]


@pytest.mark.parametrize("jobs", ["1", "3"])
def test_a_run_that_fails_stops_no_other(accuracy, trainings, tmp_path, capsys, jobs):
    trainings.failing = ("sst2/exact/1", "mrpc/daf@20/2")
    assert accuracy.main(small(tmp_path, "--jobs", jobs)) == 1
    # Without its bytes counted, sst2/daf@20/1 has no budget.
    assert "sst2/daf@20/1" not in trainings.made
    assert len(trainings.made) == 11
    table = (tmp_path / "accuracy.md").read_text()
    assert "- mrpc daf@20 seed 2 (error: no room)" in table
    assert "- sst2 exact seed 1 (error: no room)" in table
    said = " ".join(capsys.readouterr().out.split())
    assert "what sst2 exact seed 1 counts: not finished" in said


def test_runs_of_other_options_are_not_mixed(accuracy, trainings, tmp_path, capsys):
    accuracy.main(small(tmp_path))
    trainings.made.clear()
    assert accuracy.main(small(tmp_path, "--max_steps", "7", "--seeds", "1", "3")) == 1
    assert set(trainings.made) == {
        f"{task}/{setting}/3"
        for task in ("sst2", "mrpc")
        for setting in ("exact", "plain", "daf@20")
    }
    assert "holds a run with other options; use another --out" in capsys.readouterr().out


def test_the_command_has_every_option(accuracy, tmp_path):
    arguments = ["--out", str(tmp_path), "--short", "--tasks", "stsb", "--learning_rate", "0.002"]
    options = accuracy.parse([*arguments, "--settings", "daf@20"])
    assert (options.tasks, options.seeds, options.max_steps) == (["stsb"], [1], 20)
    (exact,), (daf,) = accuracy.waves(options)
    script = importlib.import_module("run_glue")
    for run in (exact, daf):
        model, data, lora, daf_args, training = script.parse_arguments(run.command(Path("d"))[2:])
        assert (model.model_name_or_path, data.task_name, data.data_dir) == ("minilm", "stsb", "d")
        assert (data.max_seq_length, lora.modules_to_save) == (64, ["classifier", "pooler"])
        assert (training.max_steps, training.learning_rate, training.seed) == (20, 0.002, 1)
        assert training.per_device_train_batch_size == 32
        assert training.do_train and training.do_eval and training.save_strategy == "no"
        assert daf_args.daf_config == str(run.folder / "daf.json") and not daf_args.no_daf


@pytest.mark.parametrize("option", ["--jobs", "--max_steps", "--batch_size"])
def test_counts_below_one_are_refused(accuracy, capsys, option):
    with pytest.raises(SystemExit):
        accuracy.parse([option, "0"])
    assert f"{option} 0: use 1 or more" in capsys.readouterr().err


def test_a_failure_of_the_real_script_is_told(accuracy, tmp_path):
    command = ["--settings", "plain", "--tasks", "rte", "--seeds", "1", "--out", str(tmp_path)]
    assert accuracy.main([*command, "--data_dir", str(tmp_path / "absent")]) == 1
    runs, unfinished = importlib.import_module("accuracy_report").read_runs(tmp_path)
    assert runs == []
    (line,) = unfinished
    assert line.startswith("rte plain seed 1 (error: ") and "absent: no such folder" in line


# --- a whole run -----------------------------------------------------------------------------


@pytest.fixture
def tiny_model(tmp_path):
    """A folder with a tiny BERT."""
    folder = tmp_path / "model"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "play"]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 64, "max_position_embeddings": 32}  # fmt: skip
    model = BertForSequenceClassification(BertConfig(vocab_size=len(words), **sizes))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words))
    return folder


def test_a_budget_is_a_part_of_what_the_same_steps_hold(
    accuracy, report, tiny_model, tmp_path, monkeypatch
):
    data, out = tmp_path / "SST-2", tmp_path / "out"
    data.mkdir()
    lines = [f"{word} film good play bad\t{int(word == 'good')}" for word in ("good", "bad")]
    for name in ("train.tsv", "dev.tsv"):
        (data / name).write_text("\n".join(["sentence\tlabel", *(lines * 16), ""]))
    script = importlib.import_module("run_glue")

    def in_this_process(command, **options):
        assert command[:2] == [sys.executable, str(accuracy.SCRIPT)]
        script.main([*command[2:], "--use_cpu"])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(accuracy.subprocess, "run", in_this_process)
    status = accuracy.main(
        ["--settings", "plain", "daf@4", "--tasks", "sst2", "--seeds", "1", "--max_steps", "2",
         "--batch_size", "16", "--model", str(tiny_model), "--data_dir", str(data),
         "--out", str(out)]
    )  # fmt: skip
    assert status == 0
    plain, exact, daf = report.build_rows(report.read_runs(out)[0])
    assert exact.difference == 0.0  # everything kept exactly trains the same
    assert plain.plain_mb == exact.held_mb
    assert 4.0 <= daf.ratio < 5 and daf.held_mb <= plain.plain_mb / 4
    assert 0 < daf.mean_bits < 9
