"""The server arguments of the *installed* SGLang, asked in its own environment and remembered.

Importing SGLang takes seconds and drags torch in, so the daemon never does it: a subprocess with
``[fleet] python`` describes the parser once for each SGLang version and interpreter.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from evald.engines.argument import Argument, ServerArguments
from evald.engines.environment import cache_directory
from evald.errors import ConfigError

SCRIPT = Path(__file__).parent / "ask_sglang.py"
STANDIN = Path(__file__).parent / "cpu_mode" / "standin"
#: part of every cache key: what a new evald asks is not answered by what an old one stored.
FORMAT = 1
#: importing SGLang takes about 5 s, from a cold network file system much longer.
TIMEOUT_S = 300.0


class _Identity(msgspec.Struct, frozen=True):
    version: str
    python: str
    folders: list[str]
    changed_ns: int


def default_cache_dir(environ: Mapping[str, str]) -> Path | None:
    """Return the cache directory for evald's own; None if the environment names none."""
    if (directory := cache_directory(environ)) is not None:
        return directory / "evald"
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "evald"
    return Path(environ["HOME"]) / ".cache" / "evald" if environ.get("HOME") else None


def ask_server_arguments(
    python: str,
    *,
    cpu: bool,
    env: Mapping[str, str],
    cache_dir: Path | None,
    timeout_s: float = TIMEOUT_S,
) -> ServerArguments:
    """Return the server arguments of the SGLang that ``python`` has. Blocks: 0.1 s, or seconds.

    ``cpu``: as CPU mode starts it. ``env``: the engine's environment (``environment.engine_env``).
    ``cache_dir`` is made if it is missing; where it cannot be used, SGLang is asked each time.
    Raises ConfigError with one sentence.
    """
    who = msgspec.convert(_ask(python, ["identity"], env, timeout_s), _Identity)
    cached = None if cache_dir is None else cache_dir / f"sglang-args-{_key(who, cpu=cpu)}.json"
    if cached is not None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(cached.read_bytes(), type=ServerArguments)
    standin = [str(STANDIN)] if cpu else []
    answer = _ask(python, ["arguments", *standin], env, timeout_s)
    asked = ServerArguments(version=who.version, arguments=msgspec.convert(answer, list[Argument]))
    if cached is not None:
        with contextlib.suppress(OSError):
            _replace(cached, msgspec.json.encode(asked))
    return asked


def _key(who: _Identity, *, cpu: bool) -> str:
    parts = [FORMAT, who.version, who.python, who.folders, who.changed_ns, cpu]
    return f"{who.version}-{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]}"


def _ask(python: str, words: list[str], env: Mapping[str, str], timeout_s: float) -> object:
    what = f"cannot ask the SGLang of {python} for its server arguments"
    try:
        done = subprocess.run(  # noqa: S603 - the configured interpreter, our own script, no shell
            [python, "-W", "ignore", str(SCRIPT), *words],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except OSError as error:
        raise ConfigError([f"{what}: {error.strerror}; set [fleet] python"]) from error
    except subprocess.TimeoutExpired as error:
        problem = f"{what}: no answer after {timeout_s:g} s; is its file system slow?"
        raise ConfigError([problem]) from error
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if done.returncode:
        cause = last or f"exit code {done.returncode}"
        raise ConfigError([f"{what}: {cause}; set [fleet] python to one that has SGLang"])
    try:
        return msgspec.json.decode(done.stdout)
    except msgspec.DecodeError as error:
        raise ConfigError([f"{what}: its answer is no JSON; is it a Python?"]) from error


def _replace(path: Path, content: bytes) -> None:
    """Write in one step: another daemon may read at this moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".sglang-args-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
