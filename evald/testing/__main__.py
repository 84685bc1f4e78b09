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

from aiohttp import web

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
    known, _ = parser.parse_known_args()
    return known


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
        on_death=lambda: os.kill(os.getpid(), signal.SIGKILL),
    )
    web.run_app(engine.app, host=arguments.host, port=arguments.port, access_log=None)


if __name__ == "__main__":
    main()
