from __future__ import annotations

import pytest

from evald.status.terminal.numbers import change, duration, error, rate, score, size
from evald.status.terminal.text import ASCII, UNICODE, Painter, Span, cut, cut_middle, draw, width


@pytest.mark.parametrize(
    ("text", "columns"), [("", 0), ("abc", 3), ("数学", 4), ("n\u0303", 1), ("a\u0301数", 3)]
)
def test_width_is_what_a_terminal_takes(text: str, columns: int) -> None:
    assert width(text) == columns


@pytest.mark.parametrize("columns", range(12))
@pytest.mark.parametrize("text", ["plain text", "数学問題集です", "a\u0301b\u0301c\u0301" * 5])
def test_a_cut_text_is_never_too_wide(text: str, columns: int) -> None:
    for more in ("…", "..."):
        assert width(cut(text, columns, more)) <= columns
        assert width(cut_middle(text, columns, more)) <= columns


def test_cut_texts_say_so() -> None:
    assert cut("a long sentence", 8, "…") == "a long …"
    assert cut_middle("question-12", 7, "…") == "que…-12"
    assert cut_middle("short", 5, "…") == "short"


def test_what_a_terminal_cannot_show_is_escaped() -> None:
    assert UNICODE.clean("a\x1b[0m\n\u202e\x9b数") == r"a\x1b[0m\n\u202e\x9b数"
    assert ASCII.clean("é数\x07") == r"\xe9\u6570\x07"


def test_a_row_is_cut_across_its_spans_and_has_no_spaces_at_its_end() -> None:
    line = [Span("state ", "bold"), Span("数学数学", "red"), Span("   ", "dim")]
    assert draw(line, 80, UNICODE, colour=False) == "state 数学数学"
    assert draw(line, 80, UNICODE, colour=True) == "\x1b[1mstate \x1b[0m\x1b[31m数学数学\x1b[0m"
    assert draw(line, 10, UNICODE, colour=False) == "state 数…"
    assert draw(line, 6, UNICODE, colour=False) == "state…"
    assert draw([], 10, UNICODE, colour=True) == ""


@pytest.mark.parametrize(
    ("share", "bar"),
    [(0.0, "...."), (0.01, "#..."), (0.5, "##.."), (0.99, "###."), (1.0, "####"), (2.0, "####")],
)
def test_a_bar_is_full_only_at_the_end(share: float, bar: str) -> None:
    assert "".join(span.text for span in Painter(80, ASCII).bar(share, 4)) == bar


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (125, "2m05s"), (11_040, "3h04m"), (1_047_600, "12d03h")],
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (7 << 30, "7.0 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_sizes_are_readable(n_bytes: int, text: str) -> None:
    assert size(n_bytes) == text


def test_scores_of_any_scale_stay_short() -> None:
    values = (0.0, 0.71234, -0.5, 12.345, -123.4, 12_345.6, 0.000123, float("nan"), float("inf"))
    assert [score(value) for value in values] == [
        "0.000",
        "0.712",
        "-0.500",
        "12.3",
        "-123.4",
        "1.2e+04",
        "1.2e-04",
        "nan",
        "inf",
    ]
    assert [error(value) for value in (0.021, 1.5, 0.0)] == [".021", "1.500", ".000"]
    assert [change(value) for value in (0.0312, -0.2, 0.0)] == ["+0.031", "-0.200", "+0.000"]
    assert [rate(value) for value in (None, 0.0, 3.14, 812.4, 12_345.6)] == [
        "-",
        "0.0",
        "3.1",
        "812",
        "12346",
    ]
