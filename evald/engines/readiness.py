"""When a server may be used, how much it takes at once, and how it died."""

from __future__ import annotations

import asyncio
from typing import Any

from evald.engines.api import EngineAPI, EngineError, EngineRejected, EngineUnreachable
from evald.engines.launcher import Launched
from evald.engines.pin import PinFailed
from evald.errors import EvaldError

#: between two looks at a server that starts.
START_POLL_S = 0.1
#: requests in flight when the server does not tell its own limit.
DEFAULT_LIMIT = 32
#: more connections than this bring nothing on one server.
MAX_LIMIT = 512
#: a server that dies while it loads has this long to be seen dead, so that the message can say so.
DEATH_NOTICE_S = 2.0


class ForeignServer(EvaldError):
    """Another server answers on the port that our own was given."""


async def wait_ready(api: EngineAPI, launched: Launched, probe_timeout_s: float) -> dict[str, Any]:
    """Wait for the first token of a server that is ours; its server_info.

    The caller sets the deadline. Raises ForeignServer.
    """
    taken = f"another server answers at {launched.url}"
    while True:
        try:
            served = (await api.model_info()).get("weight_version")
            break
        except EngineRejected as error:
            raise ForeignServer(f"{taken}: {error}") from error
        except EngineError:
            await asyncio.sleep(START_POLL_S)
    if served != launched.nonce:
        raise ForeignServer(f"{taken}: it has weight version {served!r}")
    while True:
        try:
            await api.health_generate(probe_timeout_s)
            return await api.server_info()
        except EngineError:
            await asyncio.sleep(START_POLL_S)


def own_limit(server_info: dict[str, Any]) -> int:
    """Read how many requests the server runs at the same time, by its own account."""
    states = server_info.get("internal_states")
    limits = [
        state.get("effective_max_running_requests_per_dp")
        for state in (states if isinstance(states, list) else [])
        if isinstance(state, dict)
    ]
    total = sum(limit for limit in limits if isinstance(limit, int) and limit > 0)
    return min(total or DEFAULT_LIMIT, MAX_LIMIT)


async def with_death(launched: Launched, error: PinFailed) -> PinFailed:
    """Add to a dropped connection that the server died, where it did."""
    if not isinstance(error.__cause__, EngineUnreachable):
        return error
    try:
        async with asyncio.timeout(DEATH_NOTICE_S):
            returncode = await launched.process.wait()
    except TimeoutError:
        return error
    death = f"the server died of it (code {returncode}), see {launched.log}"
    return PinFailed(error.stage, f"{error.detail}; {death}")
