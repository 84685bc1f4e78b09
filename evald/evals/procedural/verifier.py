"""reasoning-gym's own verifiers, as a function of grader ``python``.

A score is 1 where the verifier gives full marks, else 0. What it gives for less (many give 0.01 to
0.5, also for junk) is for training and makes no accuracy; it stands in the reason.
"""

from __future__ import annotations

import functools
import json
import warnings
from typing import Any

from reasoning_gym.factory import create_dataset

FULL_MARKS = 1.0


def score(response: str, reference: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Score one answer to a row of ``writer``; raises what the verifier raises."""
    answer = response.strip()
    if not answer:
        return {"no_answer": True, "reason": "the answer is empty"}
    marks = raw_marks(answer, reference, metadata)
    return {
        "score": marks >= FULL_MARKS,
        "answer": answer,
        "reason": f"answer: {answer[:200]} (the verifier gives {marks:g})",
    }


def raw_marks(answer: str, reference: Any, metadata: dict[str, Any]) -> float:
    """Return what the verifier gives."""
    entry = {
        "question": metadata["question"],
        "answer": reference,
        "metadata": metadata["metadata"],
    }
    config = json.dumps(metadata["config"], sort_keys=True)
    with warnings.catch_warnings():
        # (one that reads an answer as Python complains of its escapes)
        warnings.simplefilter("ignore")
        return float(_dataset(metadata["task"], config).score_answer(answer, entry))


@functools.lru_cache(maxsize=64)
def _dataset(task: str, config: str) -> Any:
    return create_dataset(task, size=1, seed=0, **json.loads(config))
