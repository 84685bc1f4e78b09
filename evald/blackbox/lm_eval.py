"""What the lm-evaluation-harness writes, in evald's words.

Read from ``results_<date>.json`` and ``samples_<task>_<date>.jsonl`` (``--log_samples``) of
lm_eval 0.4. Each task, and each group that it aggregates, is one eval set.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

#: two-sided 95 % of the normal distribution.
_Z95 = 1.959964
#: of a results file, kept as provenance.
_PROVENANCE = ("lm_eval_version", "transformers_version", "model_source", "task_hashes", "n-shot")
#: what stands in place of a standard error that there is none of.
_NOT_AVAILABLE = "N/A"


class NotFromLmEval(ValueError):
    """The file was not written by the harness."""


def find_results(directory: Path) -> list[Path]:
    """Return the results files below ``directory``, oldest first. Blocks."""
    return sorted(directory.rglob("results_*.json"), key=lambda path: (path.stat().st_mtime, path))


def convert(results: Any, path: Path) -> dict[str, Any]:
    """Turn a decoded results file into evald's form; ``path`` is where its samples are looked for.

    Raises NotFromLmEval when it is no such file.
    """
    tasks = results.get("results") if isinstance(results, dict) else None
    if not isinstance(tasks, dict):
        raise NotFromLmEval('it has no table "results": was it written by lm_eval 0.4 or newer?')
    sets = {}
    for task, row in tasks.items():
        metrics = _metrics(row)
        if metrics:
            headline = _headline(results, task, metrics)
            sets[set_name(task)] = {
                "metrics": _named(metrics, headline),
                "counts": _counts(results, task),
                **_samples(path, task, headline),
            }
    provenance = {key: results[key] for key in _PROVENANCE if key in results}
    return {"sets": sets, "provenance": {"lm_eval": provenance}}


def set_name(task: str) -> str:
    """Return the task's name as an eval set: it becomes a file's name."""
    return re.sub(r"[^A-Za-z0-9._@+-]", "_", task)


def convert_sample(raw: dict[str, Any], metric: str) -> dict[str, Any] | None:
    """Turn one line of a samples file into evald's form; None for a line of another filter.

    ``metric`` is the headline, as ``metric,filter``.
    """
    name, _, filter_name = metric.partition(",")
    if raw.get("filter", filter_name) != filter_name:
        return None
    score = raw.get(name)
    responses = raw.get("filtered_resps") or []
    return {
        "question": str(raw.get("doc_id", "")),
        "status": "scored",
        # some metrics are no number for a single sample: pairs that are added up later
        "score": score if isinstance(score, int) or _is_finite(score) else None,
        # one text; or several numbers, the likelihoods of choices
        "response": responses[0] if _is_one_text(responses) else json.dumps(responses),
        "reference": raw.get("target"),
        "doc": raw.get("doc"),
        "arguments": raw.get("arguments"),
    }


def _is_finite(score: Any) -> bool:
    return isinstance(score, float) and math.isfinite(score)


def _is_one_text(responses: Any) -> bool:
    return isinstance(responses, list) and len(responses) == 1 and isinstance(responses[0], str)


def _metrics(row: Any) -> dict[str, Any]:
    """Keep what is a metric: its name has a comma and then the filter's name."""
    row = _table(row)
    return {key: value for key, value in row.items() if "," in key and value != _NOT_AVAILABLE}


def _table(value: Any) -> dict[str, Any]:
    """Take a table as it is, and anything else as an empty one."""
    return value if isinstance(value, dict) else {}


def _is_error(metric: str) -> bool:
    return metric.partition(",")[0].endswith("_stderr")


def _headline(results: dict[str, Any], task: str, metrics: dict[str, Any]) -> str:
    """Choose the first metric that the task itself names; else the first one that it has."""
    listed = _table(_table(results.get("configs")).get(task)).get("metric_list")
    names = [_table(entry).get("metric") for entry in listed] if isinstance(listed, list) else []
    values = [key for key in metrics if not _is_error(key)] or list(metrics)
    return next((k for name in names for k in values if k.partition(",")[0] == name), values[0])


def _named(metrics: dict[str, Any], headline: str) -> dict[str, Any]:
    """Give metrics evald's names: the headline, its error, and all of them under their own."""
    name, _, filter_name = headline.partition(",")
    value, error = metrics[headline], metrics.get(f"{name}_stderr,{filter_name}")
    named = {"score": value}
    if isinstance(value, int | float) and isinstance(error, int | float):
        named |= {
            "stderr": error,
            "ci95_low": value - _Z95 * error,
            "ci95_high": value + _Z95 * error,
        }
    for key, each in metrics.items():
        own, _, own_filter = key.partition(",")
        named[own if own_filter == "none" else f"{own}/{own_filter}"] = each
    return named


def _counts(results: dict[str, Any], task: str) -> dict[str, int]:
    """Count documents; a group has no number of its own."""
    number = _table(_table(results.get("n-samples")).get(task)).get("effective")
    return {"n_total": number, "n_scored": number} if isinstance(number, int) else {}


def _samples(path: Path, task: str, headline: str) -> dict[str, Any]:
    date = path.stem.removeprefix("results_")
    samples = path.parent / f"samples_{task}_{date}.jsonl"
    return {"samples": str(samples), "lm_eval_metric": headline} if samples.is_file() else {}
