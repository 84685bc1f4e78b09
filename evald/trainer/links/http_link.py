"""Ask the daemon over its HTTP API: from another host with its token, or on its unix socket."""

from __future__ import annotations

import os
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import structlog

from evald.errors import EvaldError
from evald.status.token import TOKEN_VARIABLE, check_token, read_token
from evald.status.view import StatusView
from evald.trainer.links.http_answers import (
    FAULTS,
    NOT_UNDERSTOOD,
    Answer,
    TooLarge,
    is_same,
    lines_in,
    newest_seq,
    read_into,
    records_in,
)
from evald.trainer.links.http_connection import Connection, Place, parse_url

log = structlog.get_logger(__name__)

#: no answer of an evald is larger; a page of records has some 8 MiB.
_MOST_BYTES = 64 << 20
_MOST_SAMPLES_BYTES = 1 << 30
#: timeouts that a record gets which is too large for one.
_MOST_PATIENCE = 8
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class Refused(EvaldError):
    """The daemon does not take the token."""


class HttpLink:
    """A ``Link`` over HTTP; keeps its connection. Any thread may call; one call at a time.

    ``url``: ``http://host:port``, ``https://...`` (a proxy's) or ``unix:/path/to/socket``. The
    token is given, or read from ``token_file``, or taken from ``$EVALD_TOKEN``; a unix socket needs
    none. Each call ends within ``timeout_s``, one for samples within ``samples_timeout_s``.

    A daemon that is not there, and one that refuses the token, are no error of the calls: training
    must not die of them. They are logged once; :meth:`check` tells them apart. The constructor
    raises ValueError for a URL, and EvaldError for a token, that cannot be used.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        timeout_s: float = 5.0,
        *,
        samples_timeout_s: float = 60.0,
    ) -> None:
        self.url = url
        self._place = parse_url(url)
        self._headers = _headers(self._place, token, token_file)
        self._timeout_s = timeout_s
        self._samples_timeout_s = samples_timeout_s
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._said = ""
        #: how often another ledger has taken the place of the one that was read.
        self.restarts = 0
        #: the newest record that was returned: the same ledger still has it.
        self._newest: dict[str, Any] | None = None
        #: timeouts that the next question for records may take.
        self._patience = 1

    @property
    def where(self) -> str:
        """Where a status is looked for."""
        return self.url

    def check(self) -> bool:
        """Tell whether a daemon answers; for the start of a job.

        Raises Refused when it does not take the token, EvaldError when it is no evald.
        """
        answer = self._get("/status", self._timeout_s)
        if answer is None:
            return False
        if answer.status in _REFUSED:
            raise Refused(self._refusal())
        self._view(answer)
        return True

    def status(self) -> StatusView | None:
        """Return what the daemon does now; None when it does not answer."""
        answer = self._get_ok("/status", self._timeout_s)
        if answer is None:
            return None
        try:
            return self._view(answer)
        except EvaldError as error:
            self._say(str(error))
            return None

    def records(self, after: int) -> list[dict[str, Any]]:
        """Return the ledger's records with ``seq`` above ``after``, oldest first; [] if none.

        What does not come within the timeout comes with the next call: whole records of an answer
        that was cut off count, and a record that is too large for one timeout gets some more. A
        line that is no record is passed by.
        """
        deadline = time.monotonic() + self._timeout_s * self._patience
        known, records = self._known(after), []
        position = after if known is None else after - 1
        while (left_s := deadline - time.monotonic()) > 0:
            answer = self._get_ok(f"/records?after={position}", left_s, keep_lines=True)
            if answer is None or not answer.body:
                break
            self._patience = 1
            page, fault = records_in(answer)
            if fault:
                self._say(f"cannot understand what answers at {self.url}: {fault}")
            if known is not None and page:
                if not is_same(page.pop(0), known):
                    self.restarts, self._newest = self.restarts + 1, None
                    return []
                known = None
            records += page
            position = page[-1]["seq"] if page else position + 1
            if position >= answer.newest_seq:
                break
        if records:
            self._newest = records[-1]
        return records

    def _known(self, after: int) -> dict[str, Any] | None:
        """Return the record ``after`` if it was the newest: it is asked for once more."""
        newest = self._newest
        return newest if newest is not None and newest["seq"] == after else None

    def samples(self, record_id: str, set_name: str) -> list[dict[str, Any]] | None:
        """Return the samples of one eval set of a point; None when they cannot be read."""
        query = urlencode({"record_id": record_id, "set": set_name})
        answer = self._get_ok(
            f"/samples?{query}", self._samples_timeout_s, most_bytes=_MOST_SAMPLES_BYTES
        )
        if answer is None:
            return None
        try:
            return lines_in(answer)
        except NOT_UNDERSTOOD as error:
            self._say(f"cannot understand what answers at {self.url}: {error}")
            return None

    def close(self) -> None:
        """Close the connection; a later call opens it again."""
        with self._lock:
            self._drop()

    def _get_ok(
        self,
        path: str,
        timeout_s: float,
        *,
        most_bytes: int = _MOST_BYTES,
        keep_lines: bool = False,
    ) -> Answer | None:
        answer = self._get(path, timeout_s, most_bytes=most_bytes, keep_lines=keep_lines)
        if answer is None or answer.status == HTTPStatus.NOT_FOUND:
            return None
        if answer.status in _REFUSED:
            self._say(self._refusal())
            return None
        if answer.status != HTTPStatus.OK:
            said = answer.body.decode(errors="replace").strip()
            self._say(f"cannot ask evald at {self.url}: HTTP {answer.status}: {said[:200]}")
            return None
        self._said = ""
        return answer

    def _get(
        self,
        path: str,
        timeout_s: float,
        *,
        most_bytes: int = _MOST_BYTES,
        keep_lines: bool = False,
    ) -> Answer | None:
        """Ask once; a second time when the kept connection turns out to be dead.

        ``keep_lines``: of an answer that breaks off the whole lines are an answer.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            return None
        try:
            if self._connection is not None:
                try:
                    return self._exchange(path, deadline, most_bytes, keep_lines=keep_lines)
                except FAULTS:
                    self._drop()
            return self._exchange(path, deadline, most_bytes, keep_lines=keep_lines)
        except FAULTS as error:
            self._drop()
            self._say(f"cannot ask evald at {self.url}: {error or type(error).__name__}")
            return None
        finally:
            self._lock.release()

    def _exchange(self, path: str, deadline: float, most_bytes: int, *, keep_lines: bool) -> Answer:
        if self._connection is None:
            self._connection = Connection(self._place, deadline)
            self._connection.connect()
        connection = self._connection
        connection.allow_until(deadline)
        connection.request("GET", self._place.prefix + path, headers=self._headers)
        body = bytearray()
        with connection.getresponse() as response:  # closed, it frees the connection
            newest = newest_seq(response)
            try:
                read_into(body, response, most_bytes)
            except FAULTS as fault:
                whole = body.rfind(b"\n") + 1
                ok = response.status == HTTPStatus.OK
                if keep_lines and ok and body and not whole:
                    self._patience = min(self._patience * 2, _MOST_PATIENCE)
                if not (keep_lines and ok and whole) or isinstance(fault, TooLarge):
                    raise
                del body[whole:]
                self._drop()
        if response.will_close:
            self._drop()
        return Answer(response.status, newest, bytes(body))

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _view(self, answer: Answer) -> StatusView:
        try:
            return msgspec.json.decode(answer.body, type=StatusView)
        except NOT_UNDERSTOOD as error:
            raise EvaldError(
                f"cannot understand what answers at {self.url} (HTTP {answer.status}): {error}; "
                "is it an evald, and of this version?"
            ) from error

    def _refusal(self) -> str:
        return (
            f"cannot ask evald at {self.url}: it does not take the token; give the one of its "
            f"status.token_file or status.token_env, here or in ${TOKEN_VARIABLE}"
        )

    def _say(self, sentence: str) -> None:
        """Log a fault once, until something has worked again."""
        if sentence != self._said:
            log.warning("evald_not_asked", detail=sentence)
        self._said = sentence


def _headers(
    place: Place, token: str | None, token_file: str | os.PathLike[str] | None
) -> dict[str, str]:
    if token is not None and token_file is not None:
        raise ValueError("cannot take token and token_file: give one of the two")
    if token is not None:
        token = check_token(token, "the argument token")
    elif token_file is not None:
        token = read_token(Path(token_file))
    elif place.scheme != "unix" and TOKEN_VARIABLE in os.environ:
        token = check_token(os.environ[TOKEN_VARIABLE], f"environment variable {TOKEN_VARIABLE}")
    return {} if token is None else {"Authorization": f"Bearer {token}"}
