"""When a server may be used, and how it died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from evald.engines.api import EngineAPI, EngineError, EngineRejected, EngineUnreachable
from evald.engines.launcher import Launched
from evald.engines.pin import PinFailed
from evald.errors import EvaldError

#: between two looks at a server that starts.
START_POLL_S = 0.1
#: a server that dies while it loads has this long to be seen dead, so that the message can say so.
DEATH_NOTICE_S = 2.0
#: server arguments that decide which tensors each rank holds, and as what.
_LAYOUT = ("tp_size", "pp_size", "ep_size", "dp_size", "dtype", "quantization")


class ForeignServer(EvaldError):
    """Another server answers on the port that our own was given."""


async def wait_ready(
    api: EngineAPI,
    launched: Launched,
    probe_timeout_s: float,
    *,
    generate: bool,
    on_answer: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Wait for the first token of the right server; its server_info.

    Not ``generate``: an answer will do, nothing is asked of its model. ``on_answer`` is called at
    its first answer: its program is loaded. The caller sets the deadline. Raises ForeignServer.
    """
    while True:
        try:
            served = (await api.model_info()).get("weight_version")
            break
        except EngineRejected as error:
            raise ForeignServer(f"{_whose(launched)}: {error}") from error
        except EngineError:
            await asyncio.sleep(START_POLL_S)
    on_answer()
    if launched.nonce is not None and served != launched.nonce:
        raise ForeignServer(f"{_whose(launched)}: it has weight version {served!r}")
    while True:
        try:
            if generate:
                await api.health_generate(probe_timeout_s)
            return await api.server_info()
        except EngineError:
            await asyncio.sleep(START_POLL_S)


def _whose(launched: Launched) -> str:
    if launched.nonce is None:
        return f"the server at {launched.url} refuses evald (is the API key right?)"
    return f"another server answers at {launched.url}"


def layout_of(server_info: dict[str, Any]) -> str:
    """Describe how a server holds its weights: only within a layout are checksums comparable."""
    return " ".join(f"{name}={server_info.get(name)}" for name in _LAYOUT)


def may_move(server_info: dict[str, Any]) -> bool:
    """Tell whether an answer that is aborted on a server can go on elsewhere as if it were not.

    Deterministic inference is meant not to depend on anything, and with speculative decoding an
    abort may leave several tokens that the server has not looked for an end in.
    """
    deterministic = server_info.get("enable_deterministic_inference") is True
    return not deterministic and not server_info.get("speculative_algorithm")


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
