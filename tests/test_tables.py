"""Text tables and the figures in them."""

from __future__ import annotations

import io
import math

import pytest

from daf_hf.tables import measured, megabytes, render_table


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0"),
        (1_234, "0.00123"),
        (49_960, "0.05"),
        (300_000, "0.3"),
        (1_250_000, "1.2"),
        (3_138_000_000, "3,138.0"),
        (math.inf, "inf"),
    ],
)
def test_small_sizes_keep_their_digits(nbytes, text):
    assert megabytes(nbytes) == text


def test_what_was_not_measured_is_said_so():
    assert measured(math.nan) == "not measured"
    assert measured(0.0) == "0"
    assert measured(0.2345) == "0.23"


def test_lines_are_drawn_with_what_the_terminal_can_show(monkeypatch):
    for encoding, plain in (("ascii", True), ("latin-1", True), ("utf-8", False)):
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr("sys.stdout", out)
        text = render_table("sizes", ("of", "MB"), [("a", "1.0")], 1, "all of it")
        print(text)
        assert text.isascii() == plain


def test_figures_are_aligned_and_no_line_ends_in_blanks():
    rows = [("a [long] name", "1.0"), ("b", "12.0")]
    text = render_table("sizes", ("of", "MB"), rows, 1, "all of it " * 20)
    lines = text.splitlines()
    assert lines[0] == "sizes"
    ends = {
        line.index(figure) + len(figure) for line in lines for _, figure in rows if figure in line
    }
    assert len(ends) == 1
    assert "a [long] name" in text
    assert lines[-1] == ("all of it " * 20).rstrip()
    assert not any(line.endswith(" ") for line in lines)
