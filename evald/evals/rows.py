"""One row of an eval set's file: what may stand in it, and what is said about what may not."""

from __future__ import annotations

from typing import Any

import msgspec

#: a prompt is chat messages or text.
Prompt = str | list[dict[str, Any]]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One row of an eval set."""

    id: str
    prompt: Prompt
    #: reference of the grader: text, a number, true/false, or a list of them (any of); what it
    #: means for other kinds, they say.
    label: Any = None
    #: answers to choose from, where the kind has them.
    options: list[str] = []
    metadata: Any = None
    #: tools that the chat template is told of.
    tools: list[dict[str, Any]] = []
    #: questions of one cluster (a document, a family) are not independent; "": of its own.
    cluster: str = ""


class BadRow(Exception):
    """One fault of one row, without the place."""


class KeyMissing(BadRow):
    """A row has no such key. ``setting`` names it."""

    def __init__(self, row: dict[str, Any], key: str, setting: str) -> None:
        self.key = key
        self.setting = setting
        self.has = ", ".join(row) or "nothing"
        super().__init__(
            f"key {key!r} is missing (the row has {self.has}); set {setting} to the right one"
        )

    def of_all(self, n_rows: int) -> str:
        """Say it once for all the rows of a file, of which this is the first."""
        return (
            f"key {self.key!r} is missing in all {n_rows} rows (the first has {self.has}); "
            f"set {self.setting} to the right one"
        )


def decode_row(content: bytes) -> dict[str, Any]:
    """Read one row; raises BadRow."""
    try:
        row = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRow(f"not valid JSON ({error}); give one JSON object a line") from error
    if not isinstance(row, dict):
        raise BadRow(f"the row is {json_kind(row)}; give one JSON object a line")
    return row


def row_metadata(row: dict[str, Any], key: str | None, overrides: dict[str, Any]) -> Any:
    """Take a row's metadata, with what the set lays over it; raises BadRow."""
    metadata = take(row, key, "metadata_key") if key else None
    if not overrides:
        return metadata
    if metadata is not None and not isinstance(metadata, dict):
        raise BadRow(
            f"key {key!r} is {json_kind(metadata)}, over which metadata_overrides cannot be laid; "
            "give an object"
        )
    return {**(metadata or {}), **overrides}


def row_tools(row: dict[str, Any], key: str | None) -> list[dict[str, Any]]:
    """Take the tools of a row, which may have none; raises BadRow."""
    tools = row.get(key) if key else None
    if isinstance(tools, str):
        try:
            tools = msgspec.json.decode(tools)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRow(f"key {key!r} is text, and no JSON ({error}); give tools") from error
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(
            f"key {key!r} is no list of objects; give tools as the chat template wants them"
        )
    return tools


def take(row: dict[str, Any], key: str, setting: str) -> Any:
    """Return the value of a key that must be there; raises BadRow."""
    if key not in row:
        raise KeyMissing(row, key, setting)
    return row[key]


def template_kwargs(kwargs: dict[str, Any], question: Question) -> dict[str, Any]:
    """Tell the chat template of a question's tools, beside what the config tells it."""
    return {**kwargs, "tools": question.tools} if question.tools else kwargs


def prompt_fault(prompt: Any) -> str | None:
    """Say what is wrong with a prompt, or None."""
    fault = None
    if isinstance(prompt, list):
        faults = (_message_fault(n, message) for n, message in enumerate(prompt, start=1))
        fault = next(filter(None, faults), None) if prompt else "the list of messages is empty"
    elif not isinstance(prompt, str):
        fault = f"the prompt is {json_kind(prompt)}"
    elif not prompt:
        fault = "the prompt is empty"
    if fault is None:
        return None
    return f'{fault}; give text or a list of chat messages {{"role": ..., "content": ...}}'


def _message_fault(number: int, message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"message {number} is {json_kind(message)}"
    if not isinstance(message.get("role"), str):
        return f"message {number} has no text 'role'"
    if not _is_content(message):
        return f"message {number} has no 'content' of text (images are not supported)"
    return None


def _is_content(message: dict[str, Any]) -> bool:
    """Text, a list of text parts, or nothing beside tool calls."""
    content = message.get("content")
    if content is None:
        return bool(message.get("tool_calls"))
    if isinstance(content, list):
        return bool(content) and all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
            for part in content
        )
    return isinstance(content, str)


def json_kind(value: Any) -> str:
    """Name the type of a JSON value, for people."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    if value is None:
        return "null"
    return kinds.get(type(value), "a number")
