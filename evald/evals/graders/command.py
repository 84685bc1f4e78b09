"""Grader ``command``: a program of the user's, one run for each response."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec

from evald.config_types import Text
from evald.evals.graders.contract import Grade, GraderFailed, Rules, Sample
from evald.evals.graders.external import (
    AnyLabel,
    ExternalSettings,
    Memory,
    file_digest,
    refuse_other_version,
    version_text,
)
from evald.evals.graders.program import run
from evald.evals.graders.verdict import verdict


class CommandSettings(ExternalSettings, frozen=True, kw_only=True):
    """Which program, and how it runs."""

    #: the program and its arguments, without a shell.
    argv: Annotated[list[Text], msgspec.Meta(min_length=1)]
    #: bytes of memory that each process of it may ask for; None: no limit.
    max_memory_bytes: Memory | None = None


class Command(AnyLabel):
    """A program that reads one JSON object from standard input and writes one to standard output.

    In: ``{"response", "reference", "metadata", "prompt", "question"}``: the answer (behind the
    thinking, without the box of ``boxed_command``), what the row has at ``label_key`` and
    ``metadata_key``, the prompt (text or messages) and the question's id. Out: a number, true or
    false, or an object with "score" (see ``verdict``); 1 MiB at most. Exit code 0; any other, or
    anything else on standard output, is a ``grader_error`` with the last line of standard error.
    Whatever the program has started is killed once it ends or runs out of time.
    """

    VERSION = 1

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules, CommandSettings)

    @cached_property
    def settings(self) -> CommandSettings:
        """The settings, checked before."""
        return msgspec.convert(self.rules.config, CommandSettings)

    def version(self) -> str:
        """Command line, and digests of the files that it names (not of what those read)."""
        settings = self.settings
        paths = (Path(settings.cwd, word) for word in settings.argv)
        digests = [file_digest(path) for path in paths if _is_file(path)]
        return version_text(self.VERSION, settings.argv, digests, settings.version)

    def grade(self, sample: Sample) -> Grade:
        """Run the program: for a worker process, which is killed when it takes too long."""
        refuse_other_version(self, self.rules)
        settings = self.settings
        output = run(
            settings.argv,
            request(sample),
            cwd=settings.cwd,
            max_memory_bytes=settings.max_memory_bytes,
        )
        try:
            result = msgspec.json.decode(output)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            shown = re.sub(r"\s+", " ", output[:80].decode(errors="replace")).strip() or "nothing"
            raise GraderFailed(
                f"the grader wrote {shown!r}, which is no JSON ({error}); write one object with "
                "a score, and everything else to standard error"
            ) from error
        return verdict(result)


def request(sample: Sample) -> bytes:
    """Make what the program reads."""
    whole = {
        "response": sample.response,
        "reference": sample.label,
        "metadata": sample.metadata,
        "prompt": sample.prompt,
        "question": sample.question,
    }
    return msgspec.json.encode(whole) + b"\n"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no path at all
        return False
