"""What a pool of engines is to a point."""

from __future__ import annotations

import msgspec


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What a pin of the pool means."""

    #: evald loads; false: it only reads versions, and other weights end the point.
    loads: bool = True
    #: every engine must serve before the first request; false: one is enough, others join.
    all_engines: bool = False
    #: weights are what they are: an engine with others is not waited for.
    frozen: bool = False
    #: engines go from point to point one by one; false: one point at a time has all of them.
    rolling: bool = False
    #: the last answers of a point are moved together, so that the next one gets their engines.
    consolidate: bool = False


#: what the config says by default.
ROLLING = Rules(rolling=True, consolidate=True)
