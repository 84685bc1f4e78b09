"""Words of the trainer: the small JSON files ``step_41.skip``, ``*.request`` and ``run.end``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from evald.errors import EvaldError, SnapshotGone
from evald.point import Kind, PointKey, SkipReason
from evald.staging.candidate import Candidate, Reader, name_shared
from evald.staging.files import open_file
from evald.staging.offers import RunEnded, TrainerSkip
from evald.staging.scan import FoundFile

#: such a file holds a line or two.
_MAX_BYTES = 1 << 20

_Run = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}\Z")]
#: as many digits as a directory's name may have; negative where a run's steps count from 0.
_Step = Annotated[int, Meta(gt=-(10**15), lt=10**15)]


class BrokenWord(EvaldError):
    """A file of the trainer that cannot be understood; it stays where it is."""


class UnreadableWord(BrokenWord):
    """What it says is not known yet: the disk, or somebody's rights, may be put in order."""


class SkipWord(msgspec.Struct, frozen=True):
    """This step gets no snapshot; the reason becomes a part of metric names."""

    reason: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]
    detail: str = ""
    run: _Run | None = None


class RequestWord(msgspec.Struct, frozen=True):
    """Measure a directory outside the root, or a step on engines that the trainer shares."""

    kind: Literal["baseline", "reuse", "shared"]
    step: _Step | None = None
    #: absolute, or relative to the staging root.
    path: str | None = None
    run: _Run | None = None
    weight_version: str | None = None


class RunEndWord(msgspec.Struct, frozen=True):
    """The run is over."""

    last_step: _Step
    run: _Run | None = None


_Word = TypeVar("_Word", SkipWord, RequestWord, RunEndWord)


def read_word(path: Path, word: type[_Word]) -> _Word:
    """Read one file; raises BrokenWord, UnreadableWord with one sentence, FileNotFoundError."""
    try:
        with open_file(path) as file:
            return msgspec.json.decode(file.read(_MAX_BYTES), type=word)
    except FileNotFoundError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        example = _EXAMPLES[word]
        raise BrokenWord(f"cannot understand {path}: {error}; write e.g. {example}") from error
    except OSError as error:
        raise UnreadableWord(
            f"cannot read {path}: {error.strerror}; write it with mode 0644"
        ) from error


class Listener:
    """Makes offers of words; its methods block and belong into a thread.

    ``base_dir``: what a baseline request means when it names no path; ``baseline_step``: its step;
    ``shared``: this daemon measures shared engines.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        root: Path,
        run: str,
        base_dir: Path | None,
        baseline_step: int,
        shared: bool = False,
    ) -> None:
        self._reader = reader
        self._root = root
        self._run = run
        self._base_dir = base_dir
        self._baseline_step = baseline_step
        self._shared = shared

    def hear(self, file: FoundFile) -> Candidate | TrainerSkip | RunEnded:
        """Read one file; raises BrokenWord, and FileNotFoundError when it is gone."""
        run = file.folder_run or self._run
        if file.step is not None:
            skip = read_word(file.path, SkipWord)
            key = PointKey(skip.run or run, file.step)
            return TrainerSkip(key, skip.reason, skip.detail, file.path)
        if file.kind == "run_end":
            end = read_word(file.path, RunEndWord)
            return RunEnded(end.run or run, end.last_step, file.path)
        return self._request(read_word(file.path, RequestWord), run, file)

    def _request(self, word: RequestWord, run: str, file: FoundFile) -> Candidate | TrainerSkip:
        is_baseline = word.kind == "baseline"
        step = self._baseline_step if word.step is None and is_baseline else word.step
        if step is None:
            raise BrokenWord(f"cannot understand {file.path}: it names no step")
        run = word.run or run
        if word.kind == "shared" and self._shared:
            return self._shared_point(word, run, step, file)
        if word.kind == "shared":
            return TrainerSkip(
                PointKey(run, step),
                SkipReason.UNHEALTHY,
                f"cannot measure step {step} on shared engines: this daemon launches its own and "
                "has no shared posture configured; publish a snapshot instead",
                file.path,
            )
        directory = self._base_dir if is_baseline else None
        if word.path is not None:
            directory = self._resolved(word.path, file)
        if directory is None:
            raise BrokenWord(f"cannot understand {file.path}: it names no path to reuse")
        candidate = Candidate(
            run=run,
            step=step,
            kind=Kind.BASELINE if is_baseline else Kind.STEP,
            directory=directory,
            owned=False,
            marker_time=file.mtime_ns / 1e9,
            request=file.path,
        )
        fault = _no_snapshot(candidate.directory)
        if fault is None:
            try:
                self._reader.look_again(candidate)
            except SnapshotGone as gone:
                fault = str(gone)
        if fault is not None:
            candidate.fault = (
                f"cannot use snapshot {candidate.directory}, which {file.path.name} asks for: "
                f"{fault}"
            )
        return candidate

    def _shared_point(self, word: RequestWord, run: str, step: int, file: FoundFile) -> Candidate:
        if not word.weight_version:
            raise BrokenWord(f"cannot understand {file.path}: it names no weight_version")
        candidate = Candidate(
            run=run,
            step=step,
            kind=Kind.STEP,
            directory=self._base_dir or self._root,
            owned=False,
            marker_time=file.mtime_ns / 1e9,
            request=file.path,
        )
        name_shared(candidate, word.weight_version)
        return candidate

    def _resolved(self, path: str, file: FoundFile) -> Path:
        """Follow links now: a link that moves on must not move an accepted point's bytes."""
        try:
            return Path(os.path.realpath(self._root / path))
        except (OSError, ValueError) as error:  # a loop of links, a NUL
            raise BrokenWord(f"cannot understand path in {file.path}: {error}") from error


def _no_snapshot(directory: Path) -> str | None:
    """Say why a directory can be none: asked before all that is below, say, "/" is listed."""
    try:
        str(directory).encode()
        with os.scandir(directory) as entries:
            if any(entry.name.endswith(".safetensors") for entry in entries):
                return None
    except (FileNotFoundError, NotADirectoryError):
        return "there is no such directory"
    except UnicodeEncodeError:
        return "its path is not UTF-8; rename it"
    except OSError as error:
        return f"{error.strerror}"
    return "it has no *.safetensors file; name the snapshot's own directory"


_EXAMPLES: dict[type, str] = {
    SkipWord: '{"reason": "export_failed", "detail": "disk full"}',
    RequestWord: '{"kind": "reuse", "step": 40, "path": "/checkpoints/step_40"}',
    RunEndWord: '{"last_step": 40}',
}
