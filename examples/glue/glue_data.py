r"""GLUE tasks: what each one looks like, and how to read it from its original files or the Hub.

The original ``.tsv`` files follow no quoting rule: a ``"`` is plain text, and only ``\n`` ends a
row (sentences may hold U+2028 and other characters that ``str.splitlines`` would break at).
Some start with a byte-order mark, and CoLA has no header.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from datasets import Dataset, load_dataset

HUB_DATASET = "nyu-mll/glue"


class DataError(ValueError):
    """A data folder or a row that cannot be used; the message names the place."""


@dataclass(frozen=True)
class Task:
    """One GLUE task.

    ``text_columns`` and ``label_column`` are the names in the header of the original files,
    ``hub_columns`` the names that the Hub's copy uses for the same texts. ``labels`` are the
    class names in the order of their ids; it is empty for a regression task.
    ``spelled_labels`` says that the files spell the class names out instead of giving ids.
    ``header`` is given where the files have none.
    """

    name: str
    folder: str
    text_columns: tuple[str, ...]
    label_column: str
    hub_columns: tuple[str, ...]
    labels: tuple[str, ...]
    spelled_labels: bool = False
    header: tuple[str, ...] | None = None
    dev_splits: tuple[tuple[str, str], ...] = (("validation", "dev.tsv"),)

    @property
    def is_regression(self) -> bool:
        return not self.labels

    def parse_label(self, text: str) -> int | float:
        """Turn a label as written in the files into a class id or a score."""
        if self.is_regression:
            score = float(text)
            if not isfinite(score):
                raise ValueError(f"{text!r} is no score")
            return score
        known = self.labels if self.spelled_labels else [str(i) for i in range(len(self.labels))]
        if text not in known:
            raise ValueError(f"{text!r} is no label; expected one of {', '.join(known)}")
        return known.index(text)


_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")

TASKS = {
    task.name: task
    for task in (
        Task(
            "cola",
            "CoLA",
            ("sentence",),
            "label",
            ("sentence",),
            ("unacceptable", "acceptable"),
            header=("source", "label", "mark", "sentence"),
        ),
        Task(
            "sst2",
            "SST-2",
            ("sentence",),
            "label",
            ("sentence",),
            ("negative", "positive"),
        ),
        Task(
            "mrpc",
            "MRPC",
            ("#1 String", "#2 String"),
            "Quality",
            _PAIR,
            ("not_equivalent", "equivalent"),
        ),
        Task("stsb", "STS-B", _PAIR, "score", _PAIR, ()),
        Task(
            "qqp",
            "QQP",
            ("question1", "question2"),
            "is_duplicate",
            ("question1", "question2"),
            ("not_duplicate", "duplicate"),
        ),
        Task(
            "mnli",
            "MNLI",
            _PAIR,
            "gold_label",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            spelled_labels=True,
            dev_splits=(
                ("validation_matched", "dev_matched.tsv"),
                ("validation_mismatched", "dev_mismatched.tsv"),
            ),
        ),
        Task(
            "qnli",
            "QNLI",
            ("question", "sentence"),
            "label",
            ("question", "sentence"),
            _ENTAILMENT,
            spelled_labels=True,
        ),
        Task("rte", "RTE", _PAIR, "label", _PAIR, _ENTAILMENT, spelled_labels=True),
        Task("wnli", "WNLI", _PAIR, "label", _PAIR, ("not_entailment", "entailment")),
    )
}


def get_task(name: str) -> Task:
    """Look a task up by name, whatever its case and hyphens: ``SST-2`` is ``sst2``."""
    key = name.lower().replace("-", "").replace("_", "")
    if key not in TASKS:
        raise DataError(f"unknown task {name!r}; choose one of {', '.join(TASKS)}")
    return TASKS[key]


def load_splits(
    task: Task, data_dir: str | None = None, skip_bad_rows: bool = False
) -> dict[str, Dataset]:
    """Return the training split and the full validation split(s) of ``task``.

    Every split has the columns ``text1``, for pair tasks ``text2``, and ``label``. The keys are
    ``train`` and ``validation``, or for MNLI ``validation_matched`` and ``validation_mismatched``.

    Args:
        task: the task.
        data_dir: folder of the task's original files, or the folder above it; from the Hub if None.
        skip_bad_rows: leave out rows that cannot be read (the original QQP files have a few)
            and print how many, instead of raising `DataError`.
    """
    files = (("train", "train.tsv"), *task.dev_splits)
    if data_dir is None:
        return {split: _load_from_hub(task, split) for split, _ in files}
    folder = find_task_folder(task, Path(data_dir))
    return {split: read_tsv(task, folder / name, skip_bad_rows) for split, name in files}


def find_task_folder(task: Task, data_dir: Path) -> Path:
    """Accept the task's own folder or the folder above it, with the name in any case."""
    if not data_dir.is_dir():
        raise DataError(f"{data_dir}: no such folder")
    below = [
        path
        for path in sorted(data_dir.iterdir())
        if path.is_dir() and path.name.lower() in (task.folder.lower(), task.name)
    ]
    for folder in (*below, data_dir):
        if (folder / "train.tsv").is_file():
            return folder
    raise DataError(f"{data_dir}: no train.tsv there, nor in a folder {task.folder} below it")


def read_tsv(task: Task, path: Path, skip_bad_rows: bool = False) -> Dataset:
    """Read one original file of ``task`` (see the module's notes on the format)."""
    lines = _read_lines(path)
    header = list(task.header or lines.pop(0).split("\t"))
    first_line = 1 if task.header else 2
    wanted = (*task.text_columns, task.label_column)
    missing = [name for name in wanted if name not in header]
    if missing:
        raise DataError(f"{path}, line 1: the header lacks {', '.join(missing)}")
    indices = [header.index(name) for name in wanted]
    rows = []
    for number, line in enumerate(lines, start=first_line):
        try:
            rows.append(_parse_row(task, line.split("\t"), len(header), indices))
        except ValueError as error:
            if not skip_bad_rows:
                raise DataError(f"{path}, line {number}: {error}") from None
    if len(rows) < len(lines):
        print(f"{path}: left out {len(lines) - len(rows)} unreadable rows")
    if not rows:
        raise DataError(f"{path}: no rows")
    names = (*_text_names(task), "label")
    return Dataset.from_dict(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))


def _parse_row(task: Task, fields: list[str], columns: int, indices: list[int]) -> list:
    """Pick the texts and the label out of a row; `ValueError` says what is wrong with it."""
    if len(fields) != columns:
        raise ValueError(f"{len(fields)} columns instead of {columns}")
    *texts, label = (fields[index] for index in indices)
    return [*texts, task.parse_label(label)]


def _read_lines(path: Path) -> list[str]:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8 ({error.reason})") from error
    # Files checked out on Windows end their lines in \r\n.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _text_names(task: Task) -> tuple[str, ...]:
    return tuple(f"text{index + 1}" for index in range(len(task.text_columns)))


def _load_from_hub(task: Task, split: str) -> Dataset:
    dataset = load_dataset(HUB_DATASET, task.name, split=split)
    assert isinstance(dataset, Dataset)
    dataset = dataset.rename_columns(dict(zip(task.hub_columns, _text_names(task), strict=True)))
    return dataset.select_columns([*_text_names(task), "label"])
