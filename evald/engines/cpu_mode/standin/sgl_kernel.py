"""Stand-in for SGLang's compiled kernel package on a machine without a GPU.

SGLang's CPU engine imports some names that end in ``_cpu`` (speculative decoding, cache copies) and
never calls them in plain generation. They exist here, and say so if they are called after all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def not_built(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs the compiled package")

    return not_built
