"""What an evaluation needs of a checkpoint, and where the node would look for it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from evald.trainer.publish.names import step_expression

#: weights that engines load, and the small files beside them; all names are relative, with "/".
_NEEDED = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.py",
    "*.yaml",
    "*.yml",
    "*.md",
    "LICENSE*",
)
#: of what they would let through: states of a training job.
_STATE = ("trainer_state.json", "training_args.*", "optimizer*", "scheduler*", "rng_state*")
#: folders that an evaluation may need as they are.
_FOLDERS = frozenset({"adapter", "additional_chat_templates"})


def is_needed(name: str) -> bool:
    """Tell whether an evaluation can need the file: weights, config, tokenizer, templates, code."""
    folder, is_below, _ = name.partition("/")
    if is_below:
        return folder in _FOLDERS
    return _matches(name, _NEEDED) and not _matches(name, _STATE)


def fits(name: str, pattern: str) -> bool:
    """Tell whether the node finds ``name`` below its root: it is of the pattern, or of a run's."""
    return re.fullmatch(f"([^/]+/)?{step_expression(pattern)}", name) is not None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
