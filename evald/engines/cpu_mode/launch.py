"""Start SGLang's server on a machine without a GPU: ``python launch.py SERVER_ARGUMENTS``.

Run by path in the engine's own Python environment, which need not have evald. The server's
processes are forked after the heavy imports instead of spawned: it starts in about two thirds of
the time and needs half the memory. Forking is safe here, because nothing has started threads yet.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Prepare this process, then be SGLang's launcher."""
    # Running by path put this folder first on the path; it holds nothing to import.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.path.append(str(HERE / "standin"))
    multiprocessing.set_start_method("fork")
    # The server chooses "spawn" later, in the same way: here it has been decided.
    multiprocessing.set_start_method = lambda *_args, **_kwargs: None
    # Imports make no garbage worth looking for: the search is a fifth of a start's time.
    gc.disable()
    for module in ("sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager"):
        importlib.import_module(module)
    gc.freeze()  # the forked processes need not look at it either, and go on sharing its memory
    gc.enable()
    # As with "python -m sglang.launch_server": its own main, whatever this version does there.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
