"""The demo's generated sentences: repeatable, balanced, and nothing to learn by heart."""

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest

GLUE = Path(__file__).parents[1] / "examples" / "glue"


@pytest.fixture(scope="module")
def grammar():
    sys.path.insert(0, str(GLUE))
    yield importlib.import_module("grammar")
    sys.path.remove(str(GLUE))


def test_same_seed_gives_the_same_sentences(grammar):
    first = grammar.generate(grammar.TRAIN_WORDS, 200, seed=3)
    assert first == grammar.generate(grammar.TRAIN_WORDS, 200, seed=3)
    assert first != grammar.generate(grammar.TRAIN_WORDS, 200, seed=4)


@pytest.mark.parametrize("split", ["TRAIN_WORDS", "DEV_WORDS"])
def test_balanced_over_labels_and_templates(grammar, split):
    count = 24 * len(grammar.TEMPLATES)
    examples = grammar.generate(getattr(grammar, split), count, seed=0)
    cells = Counter((example.template, example.label) for example in examples)
    assert set(cells.values()) == {12}
    assert len(cells) == 2 * len(grammar.TEMPLATES)
    assert len({example.sentence for example in examples}) == count


def test_splits_share_no_word_that_is_filled_in(grammar):
    train, dev = grammar.TRAIN_WORDS, grammar.DEV_WORDS
    for kind in ("things", "parts", "people", "good", "bad"):
        assert not set(getattr(train, kind)) & set(getattr(dev, kind)), kind
    for words in (train, dev):
        assert not set(words.good) & set(words.bad)


def test_splits_share_no_sentence(grammar):
    train = grammar.generate(grammar.TRAIN_WORDS, 2400, seed=0)
    dev = grammar.generate(grammar.DEV_WORDS, 960, seed=1)
    assert not {e.sentence for e in train} & {e.sentence for e in dev}


def test_counting_praise_and_blame_is_not_enough(grammar):
    """The sign of the sentiment words alone answers close to chance."""
    words = grammar.TRAIN_WORDS
    right = 0.0
    examples = grammar.generate(words, 2400, seed=0)
    for example in examples:
        text = f" {example.sentence.replace(',', ' ')} "
        balance = sum(f" {w} " in text for w in words.good)
        balance -= sum(f" {w} " in text for w in words.bad)
        right += 0.5 if balance == 0 else (balance > 0) == (example.label == 1)
    assert 0.35 < right / len(examples) < 0.65


def test_asking_for_too_many_is_refused(grammar):
    few = grammar.Lexicon(("film", "play"), ("plot",), ("a man",), ("good",), ("bad",))
    with pytest.raises(ValueError, match="does not yield 5000"):
        grammar.generate(few, 5000, seed=0)


def test_files_are_in_the_layout_of_sst2(grammar, tmp_path):
    grammar.write_dataset(tmp_path / "data", 48, 24, seed=0)
    for name, count in (("train.tsv", 48), ("dev.tsv", 24)):
        header, *rows = (tmp_path / "data" / name).read_text(encoding="utf-8").splitlines()
        assert header == "sentence\tlabel"
        assert len(rows) == count
        assert {row.split("\t")[1] for row in rows} == {"0", "1"}
