"""Text from elsewhere, made fit for one line of a record."""

import json

import msgspec

from evald.text import encode_json, one_line


class Struct(msgspec.Struct, tag_field="type", tag="x"):
    text: str
    more: dict[str, list[str | int]]


def test_what_can_be_shown_stays() -> None:
    assert one_line("grün und 数") == "grün und 数"


def test_what_cannot_be_shown_is_escaped() -> None:
    assert one_line("a\nb\x1b\udcff\u2028") == r"a\nb\x1b\udcff\u2028"


def test_half_a_surrogate_pair_is_encoded_readably() -> None:
    struct = Struct("a\udcff", {"b\ud800": ["c\ud800", 1]})
    assert json.loads(encode_json(struct)) == {
        "type": "x",
        "text": r"a\udcff",
        "more": {r"b\ud800": [r"c\ud800", 1]},
    }
    assert encode_json(Struct("ä", {})) == msgspec.json.encode(Struct("ä", {}))
