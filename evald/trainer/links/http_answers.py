"""What a daemon answers over HTTP, read by somebody who must not be hurt by it."""

from __future__ import annotations

import http.client
from typing import Any

import msgspec

from evald.status.view import LAST_SEQ_HEADER

_CHUNK_BYTES = 256 << 10
#: ``seq`` has no more digits.
_SEQ_DIGITS = 18
#: what an exchange can end with.
FAULTS = (OSError, http.client.HTTPException)
#: what comes of a body that is none of evald's.
NOT_UNDERSTOOD = (msgspec.DecodeError, ValueError, RecursionError)
_decoder: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class TooLarge(http.client.HTTPException):
    """An answer that no evald gives."""


class Answer(msgspec.Struct):
    """A whole answer, or the whole lines of one that broke off."""

    status: int
    #: of the ledger; 0: the answer does not say.
    newest_seq: int
    body: bytes


def read_into(body: bytearray, response: http.client.HTTPResponse, most_bytes: int) -> None:
    """Read a body piece by piece; what came before a fault is in ``body``. Raises FAULTS."""
    while chunk := response.read1(_CHUNK_BYTES):
        if len(body) + len(chunk) > most_bytes:
            raise TooLarge(f"the answer has more than {most_bytes >> 20} MiB")
        body += chunk
    if response.length:  # read1 ends silently where a connection breaks off
        raise http.client.IncompleteRead(b"", response.length)


def newest_seq(response: http.client.HTTPResponse) -> int:
    """Return the newest ``seq`` that the daemon names; raises HTTPException for nonsense."""
    newest = response.headers.get(LAST_SEQ_HEADER, "0")
    if len(newest) > _SEQ_DIGITS or not newest.isdecimal():
        raise http.client.HTTPException(f"cannot understand its header {LAST_SEQ_HEADER}")
    return int(newest)


def lines_in(answer: Answer) -> list[dict[str, Any]]:
    """Return the objects of the lines; raises NOT_UNDERSTOOD if one of them is none."""
    return [_decoder.decode(line) for line in answer.body.splitlines()]


def records_in(answer: Answer) -> tuple[list[dict[str, Any]], str]:
    """Return what is a record, in its order, and what is wrong with a line that is none."""
    records, fault = [], ""
    for line in answer.body.splitlines():
        try:
            record = _decoder.decode(line)
        except NOT_UNDERSTOOD as error:
            fault = str(error)
            continue
        seq = record.get("seq")
        if type(seq) is int and 0 <= seq < 10**_SEQ_DIGITS:
            records.append(record)
        else:
            fault = "a record without its seq"
    return records, fault


def is_same(record: dict[str, Any], known: dict[str, Any]) -> bool:
    """Tell whether a record is the one that was read before, and not another ledger's."""
    return all(record.get(name) == known.get(name) for name in ("seq", "record_id", "time"))
