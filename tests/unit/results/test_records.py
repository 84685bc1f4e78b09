import msgspec
import pytest

from evald.results.records import Alert, Counts, Newer, decode, decode_any

ALERT = Alert(seq=3, run="a", step=0, record_id="x", name="n", detail="d")


def test_counts_add_up() -> None:
    total = Counts(n_total=2, n_scored=1, n_error=1) + Counts(n_total=1, n_scored=1, n_resumed=1)
    assert total == Counts(n_total=3, n_scored=2, n_error=1, n_resumed=1)


def test_a_record_comes_back_as_it_was() -> None:
    line = msgspec.json.encode(ALERT)
    assert decode(line) == decode_any(line) == ALERT
    assert line.startswith(b'{"type":"alert","schema":1,"seq":3,')


def test_what_a_newer_minor_version_wrote_is_passed_by() -> None:
    more = msgspec.json.decode(msgspec.json.encode(ALERT)) | {"surprise": True}
    assert decode_any(msgspec.json.encode(more)) == ALERT
    line = b'{"schema":1,"seq":4,"type":"future","x":[1]}'
    assert decode_any(line) == Newer(schema=1, seq=4, type="future")
    with pytest.raises(msgspec.ValidationError, match="it has schema 2, this evald reads 1"):
        decode_any(line.replace(b'"schema":1', b'"schema":2'))
