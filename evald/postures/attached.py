"""The attached posture: servers that somebody else runs; pinned if they may be, never stopped."""

from __future__ import annotations

from collections.abc import Mapping

from evald.config import Attached
from evald.engines.attach_launcher import AttachLauncher, engine_names, read_api_key
from evald.engines.engine import Upkeep
from evald.engines.pin import Checksums, Loading
from evald.postures.engine_pool import EnginePool, Member
from evald.postures.front import Front
from evald.postures.rules import ROLLING, Rules


def attached_engines(
    config: Attached, *, environ: Mapping[str, str], rules: Rules = ROLLING
) -> EnginePool:
    """Build the pool of the servers at ``config.urls``; raises ConfigError (no API key).

    Points roll by ``rules`` where evald loads, and no router stands before the servers.
    """
    api_key = read_api_key(
        "attached", env=config.api_key_env, file=config.api_key_file, environ=environ
    )
    loading = Loading(
        load_format="auto",
        timeout_s=config.load_timeout_s,
        checksums=Checksums(),
        path_map=config.path_map,
    )
    upkeep = Upkeep(
        start_timeout_s=config.alive_timeout_s,
        owned=False,
        loading=loading if config.pin else None,
        on_demand=not config.pin,
    )
    members = [
        Member(name=name, launcher=AttachLauncher(url, api_key), upkeep=upkeep)
        for name, url in zip(engine_names(config.urls), config.urls, strict=True)
    ]
    front = None
    if config.router is not None:
        front = Front(config.router, api_key, route_timeout_s=config.route_timeout_s)
    # a router may send a request anywhere: all of its engines must have the weights
    if front is not None or not config.pin:
        rules = Rules(loads=config.pin, all_engines=front is not None)
    return EnginePool(members, config, rules, front=front)
