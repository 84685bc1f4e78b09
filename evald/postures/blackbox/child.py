"""What runs in the process of ``[blackbox] class``: builds the object, hands it points.

Run by path, standard library only: ``python child.py SOCKET MODULE:CLASS``, in the user's
interpreter (3.10 or newer), which need not have evald. SOCKET is an abstract unix socket on which
the daemon listens; lines of JSON go over it. Results go into a file: standard output is the user's.

From the daemon: ``{"config"}`` once, then ``{"dir", "point", "output"}`` for each point. To it:
``{"type": "ready"}``, and for each point ``began`` and then ``done``; ``skip`` or ``failed`` at any
time.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

EVALD = Path(__file__).resolve().parents[2]
#: longest message from the daemon, bytes.
LIMIT_BYTES = 16 * 2**20
#: how much of an exception's own words is reported, characters.
MESSAGE_CHARS = 1000


def offer_evald() -> None:
    """Make the daemon's own ``evald`` importable, without anything else of its environment."""
    spec = importlib.util.spec_from_file_location(
        "evald", EVALD / "__init__.py", submodule_search_locations=[str(EVALD)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {EVALD}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["evald"] = module
    spec.loader.exec_module(module)


def load_class(name: str) -> Any:
    """Import ``module:Class``; modules in the working directory are found first."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def in_words(error: BaseException) -> str:
    """Give the type and message of an exception, on one line."""
    message = " ".join(str(error).split())[:MESSAGE_CHARS]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def write_results(results: Any, path: Path) -> None:
    """Write results.json, and each set's samples into a file beside it; raises TypeError."""
    from evald.blackbox import Results, SetResults  # noqa: PLC0415 (offered first)

    if not isinstance(results, Results):
        raise TypeError(
            f"evaluate_checkpoint returned {type(results).__name__}; return evald.blackbox.Results"
        )
    sets = {}
    for number, (name, one) in enumerate(results.sets.items()):
        if not isinstance(one, SetResults):
            raise TypeError(
                f"set {name!r} is {type(one).__name__}; it must be evald.blackbox.SetResults"
            )
        samples = path.with_name(f"samples-{number}.jsonl")
        sets[name] = {
            "metrics": {metric: plain(value) for metric, value in one.metrics.items()},
            "counts": dict(one.counts),
            "seconds": one.seconds,
            "samples": samples.name if one.samples else [],
        }
        if one.samples:
            with samples.open("w", encoding="ascii") as file:
                file.writelines(json.dumps(row, default=plain) + "\n" for row in one.samples)
    content = {
        "sets": sets,
        "engines": results.engines,
        "weight_versions": results.weight_versions,
        "provenance": results.provenance,
    }
    # the name appears when the content is whole
    whole = path.with_name(f".{path.name}")
    whole.write_text(json.dumps(content, default=plain), encoding="ascii")
    whole.rename(path)


def plain(value: Any) -> Any:
    """Turn a number of an array library into Python's own, and anything else into text."""
    if isinstance(value, str | int | float | None):
        return value
    try:
        return value.item()
    except (AttributeError, ValueError, TypeError, RuntimeError):
        return str(value)


class Child:
    """One object of the user's class, and the connection to the daemon."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, **message: Any) -> None:
        """Send one message."""
        self.writer.write(json.dumps(message).encode() + b"\n")
        await self.writer.drain()

    async def run(self, class_name: str) -> int:
        """Build, evaluate until the daemon hangs up, dispose; the exit code."""
        config = json.loads(await self.reader.readline())["config"]
        evaluator: Any = None
        try:
            # user code: whatever it raises is reported, and ends this process
            evaluator = load_class(class_name)(config)
        except Exception as error:  # noqa: BLE001 (as above)
            await self.report(error)
            return 1
        try:
            await self.say(type="ready")
            while line := await self.reader.readline():
                await self.evaluate(evaluator, json.loads(line))
        finally:
            await dispose(evaluator)
        return 0

    async def evaluate(self, evaluator: Any, request: dict[str, Any]) -> None:
        """Evaluate one point and say how that ended."""
        from evald.blackbox import Point  # noqa: PLC0415 (offered first)

        await self.say(type="began")
        output = Path(request["output"])
        try:
            point = Point(**request["point"], output_dir=output.parent)
            results = evaluator.evaluate_checkpoint(Path(request["dir"]), point)
            if inspect.isawaitable(results):
                results = await results
            await asyncio.to_thread(write_results, results, output)
        except Exception as error:  # noqa: BLE001 (user code: reported, and the daemon decides)
            await self.report(error)
            return
        await self.say(type="done")

    async def report(self, error: Exception) -> None:
        """Send what the user's code raised; the log has all of it."""
        from evald.blackbox import EvalSkip  # noqa: PLC0415 (offered first)

        if isinstance(error, EvalSkip):
            await self.say(type="skip", reason=str(error.reason), detail=str(error.detail))
            return
        traceback.print_exception(error)
        sys.stderr.flush()
        await self.say(type="failed", detail=in_words(error))


async def dispose(evaluator: Any) -> None:
    """Let the object clean up; the daemon's grace is the deadline."""
    method = getattr(evaluator, "dispose", None)
    if method is None:
        return
    result = method()
    if inspect.isawaitable(result):
        await result


async def main(socket_name: str, class_name: str) -> int:
    """Connect and run; SIGTERM cancels whatever runs, then the object is disposed of."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    reader, writer = await asyncio.open_unix_connection(f"\0{socket_name}", limit=LIMIT_BYTES)
    try:
        return await Child(reader, writer).run(class_name)
    except asyncio.CancelledError:
        return 0  # asked to end, by SIGTERM: nobody else cancels the main task
    finally:
        writer.close()


if __name__ == "__main__":
    # the directory of this file must not stand in for libraries; the user's own is the current one
    sys.path[0] = os.getcwd()  # noqa: PTH109 (text is wanted)
    offer_evald()
    raise SystemExit(asyncio.run(main(*sys.argv[1:])))
