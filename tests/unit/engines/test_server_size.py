from __future__ import annotations

from typing import Any

import msgspec
import pytest

from evald.engines.server_size import MOST, START_LIMIT, ServerSize, read_size, total


def info(*, ranks: int = 1, **values: Any) -> dict[str, Any]:
    """What SGLang 0.5.23 says of itself, as far as it matters; ``values`` of each rank."""
    state = {
        "effective_max_running_requests_per_dp": 256,
        "memory_usage": {"weight": 8.0, "token_capacity": 600_000},
        "cuda_graph_config": {"decode": {"backend": "full", "max_bs": 256, "bs": [1, 2, 256]}},
        **values,
    }
    return {"version": "0.5.23", "device": "cuda", "internal_states": [state] * ranks}


WHOLE = ServerSize(running=256, graph=256, tokens=600_000)


@pytest.mark.parametrize(
    ("answer", "size"),
    [
        (info(), WHOLE),
        (info(ranks=2), ServerSize(running=512, graph=512, tokens=1_200_000)),
        (
            info(cuda_graph_config=None, cuda_graph_max_bs=160),
            ServerSize(running=256, graph=160, tokens=600_000),
        ),
        (
            info(cuda_graph_config={"decode": {"backend": "disabled", "max_bs": 256}}),
            ServerSize(running=256, tokens=600_000),
        ),
        (info(disable_cuda_graph=True), ServerSize(running=256, tokens=600_000)),
        (info(device="cpu"), ServerSize(running=256, tokens=600_000)),
        (info(memory_usage=None, max_total_num_tokens=9), msgspec.structs.replace(WHOLE, tokens=9)),
        (info(memory_usage=None, cuda_graph_config=True), ServerSize()),
        (info(effective_max_running_requests_per_dp=True), ServerSize(graph=256, tokens=600_000)),
        ({"internal_states": []}, ServerSize()),
        ({"internal_states": ["?"]}, ServerSize()),
        ({}, ServerSize()),
    ],
)  # fmt: skip
def test_what_a_server_says(answer: dict[str, Any], size: ServerSize) -> None:
    assert read_size(answer) == size


@pytest.mark.parametrize(
    ("size", "configured", "start", "most"),
    [
        (ServerSize(), None, START_LIMIT, MOST),
        (ServerSize(), 8, 8, 8),
        # all that runs, and a few that wait
        (WHOLE, None, 268, 268),
        (WHOLE, 100, 100, 100),
        (ServerSize(running=128), None, 134, 134),
        (ServerSize(running=1), None, 3, 3),
        (ServerSize(running=4096), None, 256, MOST),
        # nothing beyond large graphs; beyond small ones, once that has been measured to pay
        (ServerSize(running=2048, graph=256), None, 256, 256),
        (ServerSize(running=2048, graph=64), None, 64, MOST),
        (ServerSize(running=256, graph=64), None, 64, 268),
        # a small cache
        (ServerSize(running=256, graph=256, tokens=20_000), None, 78, 268),
        (ServerSize(running=256, graph=256, tokens=2_000), None, START_LIMIT, 268),
    ],
)
def test_where_the_search_begins_and_ends(
    size: ServerSize, configured: int | None, start: int, most: int
) -> None:
    assert (size.start(configured), size.most(configured)) == (start, most)


def test_a_router_has_what_its_servers_have() -> None:
    assert total([WHOLE, WHOLE]) == ServerSize(running=512, graph=512, tokens=1_200_000)
    assert total([WHOLE, ServerSize(running=1)]) == ServerSize(running=257)
    assert total([]) == ServerSize()
