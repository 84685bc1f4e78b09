"""How much a server can run at once, by its own account: where the search for a limit begins.

Within the batch that its CUDA graphs were captured for, more in flight costs nothing; beyond it
SGLang runs without graphs (on an H200, 256 in flight with a graph of 64: a third of the speed), and
beyond ``running`` requests wait in its queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

#: samples in flight of a server that does not say what it can run.
START_LIMIT = 32
#: the bound where none is configured: connections cost both sides, and no server runs more at once.
MOST = 512
#: so many are a server's full speed, or nearly: a try beyond a graph of that size would only cost.
ENOUGH = 256
#: share of what runs that may wait, so that a place is taken the moment it is free; and at least.
SUPPLY_SHARE, LEAST_SUPPLY = 0.05, 2
#: tokens of KV cache that a sample is taken to need before anything was measured.
SAMPLE_TOKENS = 256


class ServerSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says, over all its data parallel ranks; None: it does not."""

    #: requests that it runs at once.
    running: int | None = None
    #: largest batch with a CUDA graph; None also where it has no graphs (CPU, or disabled).
    graph: int | None = None
    #: tokens in its KV cache.
    tokens: int | None = None

    def most(self, configured: int | None) -> int:
        """Return the largest limit worth trying; ``configured``: the config's bound."""
        most = configured or MOST
        if self.running is None:
            return most
        if self.graph is not None and ENOUGH <= self.graph < self.running:
            return min(most, self.graph)
        return min(most, _supplied(self.running))

    def start(self, configured: int | None) -> int:
        """Return the limit to begin with, at most ``most``."""
        most = self.most(configured)
        if self.running is None:
            return min(START_LIMIT, most)
        free = ENOUGH if self.graph is None else self.graph
        fits = most if self.tokens is None else max(START_LIMIT, self.tokens // SAMPLE_TOKENS)
        return min(most if free >= self.running else free, fits, most)


def read_size(server_info: dict[str, Any]) -> ServerSize:
    """Read an answer of /server_info; what is not understood is None."""
    states = server_info.get("internal_states")
    ranks = [one for one in states if isinstance(one, dict)] if isinstance(states, list) else []
    if not ranks:
        return ServerSize()
    state = {**server_info, **ranks[0]}
    each = _positive(state.get("effective_max_running_requests_per_dp"))
    graph, tokens = _graph(state), _tokens(state)
    if graph is None and not _without_graphs(state):
        each = None  # it has some, of sizes that it does not tell: no start is a good one
    return ServerSize(
        running=None if each is None else each * len(ranks),
        graph=None if graph is None else graph * len(ranks),
        tokens=None if tokens is None else tokens * len(ranks),
    )


def total(sizes: Iterable[ServerSize]) -> ServerSize:
    """Add up servers behind one router; what one of them does not say is unknown."""
    known = list(sizes)
    return ServerSize(
        running=_sum([size.running for size in known]),
        graph=_sum([size.graph for size in known]),
        tokens=_sum([size.tokens for size in known]),
    )


def _supplied(running: int) -> int:
    return running + max(LEAST_SUPPLY, int(SUPPLY_SHARE * running))


def _graph(state: dict[str, Any]) -> int | None:
    """Find the largest batch of the decode graphs; older versions have a field for it."""
    if _without_graphs(state):
        return None
    return _positive(_decode_config(state).get("max_bs")) or _positive(
        state.get("cuda_graph_max_bs")
    )


def _without_graphs(state: dict[str, Any]) -> bool:
    """Whether it says that it has none: on a CPU, or where they were disabled."""
    return (
        state.get("device") != "cuda"
        or state.get("disable_cuda_graph") is True
        or _decode_config(state).get("backend") == "disabled"
    )


def _decode_config(state: dict[str, Any]) -> dict[str, Any]:
    config = state.get("cuda_graph_config")
    decode = config.get("decode") if isinstance(config, dict) else None
    return decode if isinstance(decode, dict) else {}


def _tokens(state: dict[str, Any]) -> int | None:
    memory = state.get("memory_usage")
    capacity = memory.get("token_capacity") if isinstance(memory, dict) else None
    return _positive(capacity) or _positive(state.get("max_total_num_tokens"))


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
