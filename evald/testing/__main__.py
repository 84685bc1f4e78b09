"""``python -m evald.testing``: a FakeEngine as a process, with SGLang's own arguments.

Unknown arguments are ignored, so it can stand in for ``sglang.launch_server`` (``[fleet] python``
names a script that calls it). ``POST /fault`` scripts faults from outside.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import msgspec
from aiohttp import web

from evald.testing.decode_model import Decode
from evald.testing.fake_engine import FakeEngine


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evald.testing", allow_abbrev=False)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--config", type=Path, help="JSON file with the api-key")
    parser.add_argument("--max-running-requests", type=int, default=128)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--response-chars", type=int, default=0)
    parser.add_argument("--vary", type=int, default=0)
    parser.add_argument("--fault-file", type=Path)
    parser.add_argument("--decode", type=_decode, help="a Decode as JSON")
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--usage-dir", type=Path, help="where it writes its usage when it stops")
    known, _ = parser.parse_known_args()
    return known


def _decode(text: str) -> Decode:
    try:
        return msgspec.json.decode(text, type=Decode)
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main() -> None:
    """Serve until a signal or a fatal request."""
    arguments = _arguments()
    config = json.loads(arguments.config.read_text()) if arguments.config else {}
    engine = FakeEngine(
        arguments.model_path,
        weight_version=arguments.weight_version,
        api_key=config.get("api-key"),
        delay_s=arguments.delay_s,
        response_chars=arguments.response_chars,
        vary=arguments.vary,
        fault_file=arguments.fault_file,
        max_running_requests=arguments.max_running_requests,
        decode=arguments.decode,
        load_s=arguments.load_s,
        on_death=lambda: os.kill(os.getpid(), signal.SIGKILL),
    )
    web.run_app(engine.app, host=arguments.host, port=arguments.port, access_log=None)
    if arguments.usage_dir is not None:
        usage = json.dumps(engine.usage())
        (arguments.usage_dir / f"{arguments.port}.{os.getpid()}.json").write_text(usage)


if __name__ == "__main__":
    main()
