"""How many requests an engine runs at once, and the CUDA graphs for them: sized as one.

A batch larger than the largest graph runs without one (on an H200, 256 in flight with a graph of 64
cost two thirds of the speed), and a graph larger than what ever runs is memory lost. So whoever
sets what runs gets graphs for it, and who sets neither gets both from evald. Who sets the graphs
alone may have had no memory for more: there the adaptive limit begins at the graphs, and goes
beyond only where it measures that this pays.
"""

from __future__ import annotations

from collections.abc import Mapping

from evald.engines.argument import ServerArguments
from evald.engines.inherit import Setting

#: requests of an engine of few GPUs, and of many: SGLang's own graphs on large GPUs.
FEW, MANY = 256, 512
#: GPUs of an engine that are many.
MANY_GPUS = 4

RUNNING = "max_running_requests"
GRAPH = "cuda_graph_max_bs_decode"
#: with one of these, somebody else decides: graphs of certain sizes or none, or drafts, for which
#: SGLang has sizes of its own.
_LEAVE = (
    GRAPH,
    "cuda_graph_max_bs",
    "cuda_graph_config",
    "cuda_graph_bs_decode",
    "cuda_graph_bs",
    "cuda_graph_backend_decode",
    "disable_cuda_graph",
    "disable_decode_cuda_graph",
    "speculative_algorithm",
)
#: memory that somebody has dealt out by hand may have no room for larger graphs than SGLang's own.
_MEMORY = "mem_fraction_static"


def sized(
    settings: Mapping[str, Setting], arguments: ServerArguments | None, *, gpus_per_engine: int
) -> dict[str, Setting]:
    """Return the server arguments to add to ``settings`` of an engine on GPUs.

    ``arguments``: of the installed SGLang; None: not known. A graph is captured for each data
    parallel rank, and each runs its share of the requests.
    """
    unknown = arguments is not None and arguments.find(GRAPH) is None
    if unknown or any(name in settings and settings[name].value for name in _LEAVE):
        return {}
    running, dp = settings.get(RUNNING), settings.get("dp_size")
    ranks = dp.value if dp is not None and isinstance(dp.value, int) else 1
    if running is not None and isinstance(running.value, int):
        batch = max(1, min(running.value // max(ranks, 1), MANY))
        return {GRAPH: Setting(batch, f"evald, for {RUNNING}")}
    if running is not None or _MEMORY in settings:
        return {}
    batch = MANY if gpus_per_engine >= MANY_GPUS else FEW
    return {RUNNING: Setting(batch * ranks, "evald"), GRAPH: Setting(batch, "evald")}
