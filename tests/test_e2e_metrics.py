"""The metrics of E2E NLG: the official scores, with and without Java, and the files they read."""

import csv
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("evaluate", "nltk", "pycocoevalcap", "sacrebleu"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra e2e)")

ROOT = Path(__file__).parents[1]
E2E = ROOT / "examples" / "e2e_nlg"
DATA = Path(os.environ.get("DAF_HF_TEST_DATA", ROOT.parent / "shared" / "data")) / "e2e_nlg"

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no E2E data in {DATA}")
needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="Java is not installed")


def load(name):
    """Import a file of the example by its path: the GLUE example has files of the same names."""
    spec = importlib.util.spec_from_file_location(f"e2e_nlg_{name}", E2E / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def metrics():
    return load("metrics")


@pytest.fixture(scope="module")
def data():
    return load("e2e_data")


@pytest.fixture
def without_java(metrics, monkeypatch):
    monkeypatch.setattr(metrics.shutil, "which", lambda name: None)


def expected_scores():
    if not DATA.is_dir():
        return []
    with (DATA / "expected_scores.tsv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def files(data, row):
    references = data.read_references(DATA / row["references"])[1]
    return data.read_predictions(DATA / row["outputs"])[1], references


def score_files(references, predictions):
    """Run the script, and return the finished process."""
    files = ("--references", str(references), "--predictions", str(predictions))
    return subprocess.run(
        [sys.executable, str(E2E / "metrics.py"), *files],
        check=False,
        capture_output=True,
        encoding="utf-8",
    )


# --- the official scores ---------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize("row", expected_scores(), ids=lambda row: Path(row["outputs"]).stem)
def test_bleu_and_nist_are_the_official_ones(metrics, data, row):
    predictions, references = files(data, row)
    assert f"{metrics.bleu(predictions, references):.4f}" == row["BLEU"]
    assert f"{metrics.nist(predictions, references):.4f}" == row["NIST_perl"]


@needs_data
@needs_java
def test_the_rest_is_official_too_on_the_command_line():
    row = next(row for row in expected_scores() if "tgen" in row["outputs"])
    run = score_files(DATA / row["references"], DATA / row["outputs"])
    assert run.returncode == 0, run.stderr
    scores = {name: f"{value:.4f}" for name, value in json.loads(run.stdout).items()}
    names = ("BLEU", "METEOR", "ROUGE_L", "CIDEr")
    assert scores == {**{name: row[name] for name in names}, "NIST": row["NIST_perl"]}


@needs_data
def test_without_java_meteor_is_missing_and_words_are_nearly_the_same(
    metrics, data, without_java, caplog
):
    row = next(row for row in expected_scores() if "tgen" in row["outputs"])
    with caplog.at_level(logging.WARNING):
        scores = metrics.score(*files(data, row))
    assert "METEOR is left out" in caplog.text
    assert set(scores) == {"BLEU", "NIST", "ROUGE_L", "CIDEr"}
    assert abs(scores["ROUGE_L"] - float(row["ROUGE_L"])) < 1e-3
    assert abs(scores["CIDEr"] - float(row["CIDEr"])) < 1e-3


# --- properties ------------------------------------------------------------------------------

TEXTS = ["A pub near Café Rouge. It isn't cheap.", "The Mill costs £20-25, say 'some'."]
WORDS = [
    ["a", "pub", "near", "café", "rouge", "it", "is", "n't", "cheap"],
    ["the", "mill", "costs", "#", "20-25", "say", "some"],
]


def test_nltks_words(metrics):
    lines = metrics._nltk_words(TEXTS)
    assert [[word for word in line if word not in ".',"] for line in lines] == WORDS


@needs_java
def test_stanfords_words_line_by_line(metrics):
    empty_and_odd = ["", "A pub\u2028near a\r\nbar.", ""]
    answers, truths = metrics._tokenized(
        empty_and_odd, [[text] for text in [*TEXTS, ""]], metrics._stanford_words
    )
    assert answers == {0: [""], 1: ["a pub near a bar"], 2: [""]}
    assert truths == {0: [" ".join(WORDS[0])], 1: [" ".join(WORDS[1])], 2: [""]}


def test_equal_texts_score_highest(metrics, without_java):
    scores = metrics.score(TEXTS, [[text] for text in TEXTS])
    assert scores["BLEU"] == pytest.approx(1)
    assert scores["ROUGE_L"] == pytest.approx(1)
    worse = metrics.score(TEXTS[::-1], [[text] for text in TEXTS])
    assert all(worse[name] < scores[name] for name in scores)


def test_nist_by_hand(metrics):
    """Two words of two, each one of four in the references: 2 bits a word; one bigram of 0 bits."""
    assert metrics.nist(["a b"], [["a b", "c d"]]) == pytest.approx(2.0)
    assert metrics.nist(["a"], [["a b c"]]) == pytest.approx(
        1.584962500721156 * 0.5 ** ((1.0986122886681098 / 0.4054651081081644) ** 2)
    )


def test_empty_outputs_score_nothing(metrics, without_java):
    assert set(metrics.score(["", ""], [["a pub"], ["a bar"]]).values()) == {0.0}


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        ([], [], "0 predictions for 0 instances"),
        (["a"], [["a"], ["b"]], "1 predictions for 2 instances"),
        (["a", "b"], [["a"], []], "instance 2 has no reference"),
        (["a b"], ["a b"], "a list of texts for each"),
        (["a"], [()], "instance 1 has no reference"),
    ],
)
def test_what_cannot_be_scored(metrics, predictions, references, message):
    with pytest.raises(ValueError, match=message):
        metrics.score(predictions, references)


def test_as_a_module_of_evaluate(without_java, monkeypatch, tmp_path):
    import evaluate

    metric = evaluate.load(str(E2E / "metrics.py"), keep_in_memory=True)
    module = sys.modules[type(metric).__module__]
    monkeypatch.setattr(module, "_java_runs", lambda: False)
    scores = metric.compute(predictions=TEXTS, references=[[text, "else"] for text in TEXTS])
    assert scores["BLEU"] == pytest.approx(1)


# --- files -----------------------------------------------------------------------------------


def write(path, content):
    path.write_bytes(content.encode())
    return path


@needs_data
def test_the_data_has_the_published_number_of_rows(data):
    rows = {"train": (42061, 4862), "validation": (4672, 547), "test": (4693, 630)}
    for split, file in data.FILES.items():
        pairs = data.read_pairs(DATA / file)
        assert (len(pairs), len({pair["mr"] for pair in pairs})) == rows[split]


def test_references_in_both_formats(data, tmp_path):
    content = '\ufeff"mr","ref"\r\n"name[A], food[B]","He said ""A"", twice."\r\nx,y\r\nx,z\r\n'
    path = write(tmp_path / "a.csv", content)
    expected = [['He said "A", twice.'], ["y", "z"]]
    assert data.read_references(path) == (["name[A], food[B]", "x"], expected)
    path = write(tmp_path / "a.txt", 'He said "A", twice.\n\n \ny\nz\n')
    assert data.read_references(path) == (None, expected)
    assert data.read_references(write(tmp_path / "b.txt", "y\nz")) == (None, [["y"], ["z"]])


def test_predictions_in_both_formats_and_as_they_are_written(data, tmp_path):
    content = '\ufeffMR\toutput\r\n"name[A], food[B]"\t"The ""A"""\r\nx\t"A" is\r\n'
    path = write(tmp_path / "a.tsv", content)
    found = data.read_predictions(path)
    assert found == (["name[A], food[B]", "x"], ['The "A"', '"A" is'])
    data.write_predictions(tmp_path / "b.txt", ["x", "", "y\nz"])
    assert data.read_predictions(tmp_path / "b.txt") == (None, ["x", "", "y z"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "a,b\n", r"a.csv, line 1: the header must name the columns mr and ref"),
        ("a.csv", "mr,ref\nx\n", r"a.csv, line 2: not as many fields as columns"),
        ("a.csv", "mr,ref\n", "a.csv: no rows"),
        ("a.csv", 'mr,ref\n"x', r"a.csv, after line 1: unexpected end"),
        ("a.txt", " \n", "a.txt: no references"),
    ],
)
def test_references_that_cannot_be_read(data, tmp_path, name, content, message):
    with pytest.raises(data.DataError, match=message):
        data.read_references(write(tmp_path / name, content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("output\tMR\nx\ta[1]\n", "in place of a header"),
        ("a[1]\tx\nb[2]\ty\n", "in place of a header"),
        ("", "empty"),
    ],
)
def test_predictions_that_would_score_silently(data, tmp_path, content, message):
    path = tmp_path / "outputs.tsv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        data.read_predictions(path)


def test_other_files_that_cannot_be_read(data, tmp_path):
    with pytest.raises(data.DataError, match=r"none.txt: no such file"):
        data.read_predictions(tmp_path / "none.txt")
    with pytest.raises(data.DataError, match="line 2: 3 fields instead of MR and output"):
        data.read_predictions(write(tmp_path / "a.tsv", "MR\toutput\na\tb\tc\n"))
    (tmp_path / "b.txt").write_bytes(b"a\n\xff\n")
    with pytest.raises(data.DataError, match=r"b.txt, line 2: not UTF-8"):
        data.read_predictions(tmp_path / "b.txt")


def test_outputs_of_other_mrs_are_refused(tmp_path):
    references = write(tmp_path / "a.csv", "mr,ref\nx,one\ny,two\n")
    predictions = write(tmp_path / "a.tsv", "MR\toutput\nx\tone\nz\ttwo\n")
    run = score_files(references, predictions)
    assert run.returncode == 1
    assert run.stderr.startswith("error: ")
    assert "line 3: the MR 'z' is not that of the references, 'y'" in run.stderr
