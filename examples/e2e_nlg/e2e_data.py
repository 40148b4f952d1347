r"""The E2E NLG data: its files, and those of references and predictions that are scored.

Meaning representations (MRs) are texts such as ``name[Blue Spice], area[riverside]``; each has
several references, on consecutive rows of the data's csv files. Predictions come as the official
``.tsv`` files (MR and output; a field may be quoted), or as text with one output a line.
Source: Novikova, Dusek and Rieser, SIGDIAL 2017, arXiv 1706.09254.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from datasets import Dataset, load_dataset

HUB_DATASET = "tuetschek/e2e_nlg"
FILES = {
    "train": "trainset.csv",
    "validation": "devset.csv",
    "test": "testset_w_refs.csv",
}
_HUB_COLUMNS = {"meaning_representation": "mr", "human_reference": "ref"}


class DataError(ValueError):
    """A folder, file or row that cannot be used; the message names the place."""


def load_splits(data_dir: str | None = None) -> dict[str, Dataset]:
    """Return ``train``, ``validation`` and ``test``, each with the text columns mr and ref.

    Args:
        data_dir: folder of the original csv files (`FILES`); from the Hub if None.
    """
    if data_dir is None:
        return {name: _load_from_hub(name) for name in FILES}
    folder = Path(data_dir)
    if not folder.is_dir():
        raise DataError(f"--data_dir {data_dir}: no such folder")
    return {name: Dataset.from_list(read_pairs(folder / file)) for name, file in FILES.items()}


def group_references(pairs: Sequence[dict[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Return the MRs in order, and the references of each: those of consecutive equal MRs."""
    groups = [
        (mr, [pair["ref"] for pair in group])
        for mr, group in groupby(pairs, key=lambda pair: pair["mr"])
    ]
    return [mr for mr, _ in groups], [references for _, references in groups]


def read_pairs(path: Path) -> list[dict[str, str]]:
    """Read a csv file with the columns mr and ref; both are there in every row."""
    reader = csv.DictReader(io.StringIO(_read(path), newline=""), strict=True)
    if reader.fieldnames is None or not {"mr", "ref"} <= set(reader.fieldnames):
        raise DataError(f"{path}, line 1: the header must name the columns mr and ref")
    pairs = []
    try:
        for row in reader:
            if None in row or None in row.values():
                raise DataError(f"{path}, line {reader.line_num}: not as many fields as columns")
            pairs.append({"mr": row["mr"], "ref": row["ref"]})
    except csv.Error as error:
        raise DataError(f"{path}, after line {reader.line_num}: {error}") from error
    if not pairs:
        raise DataError(f"{path}: no rows")
    return pairs


def read_references(path: Path) -> tuple[list[str] | None, list[list[str]]]:
    """Read references: csv with mr and ref, or text with a blank line between instances.

    A text without blank lines has one reference for each instance.

    Returns:
        the MRs (None where the file has none), and the references of each.
    """
    if path.suffix.lower() == ".csv":
        return group_references(read_pairs(path))
    text = _read(path).strip("\n")
    instances = [block.split("\n") for block in re.split(r"\n(?:[ \t]*\n)+", text)]
    if not text.strip():
        raise DataError(f"{path}: no references")
    if len(instances) == 1:
        instances = [[line] for line in instances[0]]
    return None, instances


def read_predictions(path: Path) -> tuple[list[str] | None, list[str]]:
    """Read predictions: tsv with a header, MR and output, or text with one output a line.

    Returns:
        the MRs (None where the file has none), and the output for each.
    """
    text = _read(path)
    if not text:
        raise DataError(f"{path}: it is empty")
    lines = text.removesuffix("\n").split("\n")
    if path.suffix.lower() != ".tsv":
        return None, lines
    header = [_unquoted(field).strip().lower() for field in lines[0].split("\t")]
    if "[" in header[0] or header[-1] == "mr":
        raise DataError(
            f"{path}, line 1: {lines[0][:80]!r} in place of a header; the columns are MR and output"
        )
    mrs, outputs = [], []
    for number, line in enumerate(lines[1:], start=2):
        fields = line.split("\t")
        if len(fields) != 2:
            raise DataError(f"{path}, line {number}: {len(fields)} fields instead of MR and output")
        mrs.append(_unquoted(fields[0]))
        outputs.append(_unquoted(fields[1]))
    return mrs, outputs


def write_predictions(path: Path, outputs: Sequence[str]) -> None:
    """Write predictions as text with one output a line; line breaks within one become spaces."""
    lines = [" ".join(output.split()) + "\n" for output in outputs]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def _read(path: Path) -> str:
    """Return a file's text, with lines that end in a newline alone, whoever wrote it."""
    if not path.is_file():
        raise DataError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8 ({error.reason})") from error


def _unquoted(field: str) -> str:
    if len(field) >= 2 and field[0] == field[-1] == '"':
        return field[1:-1].replace('""', '"')
    return field


def _load_from_hub(split: str) -> Dataset:
    dataset = load_dataset(HUB_DATASET, split=split)
    assert isinstance(dataset, Dataset)
    return dataset.rename_columns(_HUB_COLUMNS).select_columns(["mr", "ref"])
