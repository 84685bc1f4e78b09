"""What determines the responses of an eval set: its questions and how they are asked.

How responses are graded is not part of it. Two points whose sets have the same digest have
responses to the same questions, and either's can be graded as the other's (``evald regrade``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import xxhash

from evald.evals.rows import Question
from evald.text import encode_json

#: settings that say how responses are graded and counted. The tag that ends a model's thinking is
#: none of them: whether a prompt opens a thought is known only of the tag that it was asked with.
_GRADING = frozenset(
    {
        "grader",
        "regex",
        "choices",
        "thinking",
        "label_key",
        "metadata_key",
        "metadata_overrides",
        "cluster_key",
    }
)
#: settings that say where in a row things stand: what stands there is looked at.
_READING = frozenset({"input_key", "tool_key", "options_key", "id_key"})


def asked_digest(
    settings: Mapping[str, Any], questions: Iterable[Question], function_version: str
) -> str:
    """Digest of all that responses depend on beside weights, tokenizer and chat template.

    ``settings``: those of the set that have an influence on a score. A function of the user's sees
    references and metadata too, so that they count where there is one.
    """
    asked = {name: value for name, value in settings.items() if name not in _GRADING | _READING}
    hasher = xxhash.xxh3_128()
    hasher.update(msgspec.json.encode([asked, function_version], order="deterministic"))
    for question in questions:
        if not function_version:
            question = Question(  # noqa: PLW2901 - the same one, without what only graders see
                id=question.id,
                prompt=question.prompt,
                options=question.options,
                tools=question.tools,
            )
        hasher.update(encode_json(question))
    return str(hasher.hexdigest())
