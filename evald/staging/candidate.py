"""A snapshot on its way to its offer, and the reading that it takes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import xxhash

from evald.config import Staging
from evald.errors import InvalidSnapshot, SnapshotGone
from evald.point import SHARED, EvalPoint, Kind, PointKey, Snapshot
from evald.presets import PRESETS
from evald.staging.completeness import Identity, completeness
from evald.staging.digest import content_digest, fingerprint
from evald.staging.failing import fails_for_now
from evald.staging.manifest import Manifest, read_manifest
from evald.staging.scan import FoundSnapshot, Layout
from evald.staging.validate import BaseModel, told, validate

#: up to here the digest is made before acceptance; above only if somebody asked for it.
_INLINE_BYTES = 32 << 20


class Candidate(msgspec.Struct, kw_only=True):
    """One directory in one state, looked at but not yet offered."""

    run: str
    step: int
    kind: Kind
    directory: Path
    owned: bool
    #: of directory and marker, as the scan saw them; empty for a directory that was asked for.
    identity: Identity = ()
    marker_time: float = 0.0
    fingerprint: str = ""
    size_bytes: int = 0
    manifest: Manifest = msgspec.field(default_factory=Manifest)
    digest: str | None = None
    #: seconds that validation took, an inline digest included.
    validate_s: float = 0.0
    #: the version that shared engines must have; then the directory is the base model's.
    weight_version: str | None = None
    #: one sentence: why no engine may see it.
    fault: str = ""
    #: the fault is the file system's, which may work again in a moment.
    fault_may_pass: bool = False
    #: file to remove once the point is in the ledger.
    request: Path | None = None
    #: that file as the scan saw it: another one of its name is another request.
    request_identity: Identity = ()

    def point(self, key: PointKey) -> EvalPoint:
        """Make it the point ``key``."""
        return EvalPoint(
            key,
            Snapshot(
                run=key.run,
                step=key.step,
                kind=key.kind,
                directory=self.directory,
                fingerprint=self.fingerprint,
                size_bytes=self.size_bytes,
                digest=self.digest,
                final=self.manifest.final,
                owned=self.owned,
                export_s=self.manifest.export_s,
                stall_s=self.manifest.stall_s,
                validate_s=self.validate_s,
                weight_version=self.weight_version,
                marker_time=self.marker_time,
            ),
        )


def name_shared(candidate: Candidate, weight_version: str) -> None:
    """Make a candidate the weights that shared engines have under ``weight_version``.

    The fingerprint holds the version, so that an open point finds it again in the ledger.
    """
    candidate.weight_version = weight_version
    candidate.fingerprint = SHARED + weight_version
    content = f"{candidate.run}\0{candidate.step}\0{weight_version}"
    candidate.digest = xxhash.xxh3_128_hexdigest(content.encode())


class Reader:
    """Reads candidates; every method blocks and belongs into a thread."""

    def __init__(self, config: Staging, layout: Layout, run: str, base: BaseModel | None) -> None:
        self._config = config
        self._layout = layout
        self._run = run
        self._base = base
        preset = PRESETS.get(config.preset or "")
        self._without_weights = preset.weights if preset else ""
        #: set when nobody waits for digests any more.
        self.stop = threading.Event()

    def look(self, found: FoundSnapshot) -> Candidate:
        """Read marker and fingerprint; raises SnapshotGone."""
        candidate = Candidate(
            run=found.folder_run or self._run,
            step=found.step,
            kind=Kind.STEP,
            directory=found.directory,
            owned=self._config.owned,
            identity=found.identity,
            marker_time=found.marker_mtime_ns / 1e9,
        )
        self.look_again(candidate)
        if not self._layout.completeness.has_manifest:
            return candidate
        try:
            with told("use snapshot", found.directory):
                marker = found.directory / self._config.marker
                candidate.manifest = read_manifest(marker, step=found.step)
                candidate.run = candidate.manifest.run or candidate.run
        except InvalidSnapshot as error:
            _note(candidate, error, error.detail)
        except FileNotFoundError as error:
            raise _gone(candidate) from error
        except OSError as error:
            sentence = f"cannot read marker {marker}: {error.strerror}; write it with 0644"
            _note(candidate, error, sentence)
        return candidate

    def look_again(self, candidate: Candidate) -> None:
        """Take the fingerprint; raises SnapshotGone."""
        try:
            candidate.fingerprint, candidate.size_bytes = fingerprint(
                candidate.directory, self._config.marker
            )
        except FileNotFoundError as error:
            raise _gone(candidate) from error

    def judge(self, candidate: Candidate, *, hashed: bool) -> None:
        """Validate, and make the digest if it is cheap or ``hashed``; raises SnapshotGone.

        A fault is noted in the candidate. Raises SnapshotGone also when the directory changed.
        """
        if candidate.weight_version is not None:
            return  # nothing that anybody loads
        before, began = candidate.fingerprint, time.monotonic()
        if not candidate.fault and self._config.validation == "full":
            self._validate(candidate)
        cheap = candidate.size_bytes <= _INLINE_BYTES or candidate.manifest.is_hashed
        if not candidate.fault and (cheap or hashed):
            self.hash(candidate)
        candidate.validate_s = time.monotonic() - began
        self.look_again(candidate)
        if candidate.fingerprint != before:
            raise SnapshotGone(f"{candidate.directory} changed while it was validated")

    def hash(self, candidate: Candidate) -> None:
        """Make the digest, and check the manifest's hashes on the way; raises SnapshotGone."""
        expected = candidate.manifest.files if self._config.validation == "full" else {}
        try:
            with told("use snapshot", candidate.directory):
                candidate.digest = content_digest(
                    candidate.directory, self._config.marker, expected=expected, stop=self.stop
                )
        except InvalidSnapshot as error:
            _note(candidate, error, error.detail)
        except FileNotFoundError as error:
            raise _gone(candidate) from error

    def _validate(self, candidate: Candidate) -> None:
        directory = candidate.directory
        if candidate.owned and self._layout.is_linked(directory):
            candidate.fault = (
                f"cannot use snapshot {directory}: it is, or lies behind, a symbolic link, and "
                "evald deletes in this root; move the directory itself here, or set "
                "staging.owned = false"
            )
            return
        try:
            validate(
                directory,
                self._base,
                owned=candidate.owned,
                manifest=candidate.manifest,
                allow_absent=self._config.allow_absent,
                without_weights=self._without_weights,
            )
        except InvalidSnapshot as error:
            _note(candidate, error, error.detail)
        except FileNotFoundError as error:
            raise _gone(candidate) from error


def check_snapshot(config: Staging, directory: Path, base: BaseModel | None) -> str | None:
    """Validate one directory outside any root, with or without a marker; None, or the fault."""
    if config.validation == "off":
        return None
    marker = directory / config.marker
    try:
        with told("use snapshot", directory):
            has_manifest = completeness(config).has_manifest and marker.is_file()
            manifest = read_manifest(marker, step=None) if has_manifest else Manifest()
        validate(directory, base, owned=False, manifest=manifest, allow_absent=config.allow_absent)
        if manifest.is_hashed:
            with told("use snapshot", directory):
                content_digest(directory, config.marker, expected=manifest.files)
    except InvalidSnapshot as error:
        return error.detail
    except OSError as error:
        return f"cannot use snapshot {directory}: {error.strerror}"
    return None


def _note(candidate: Candidate, error: Exception, sentence: str) -> None:
    candidate.fault, candidate.fault_may_pass = sentence, fails_for_now(error)


def _gone(candidate: Candidate) -> SnapshotGone:
    return SnapshotGone(f"cannot read snapshot {candidate.directory}: it, or its marker, vanished")
