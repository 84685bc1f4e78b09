from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from evald.evals.stats.names import is_set_metric
from evald.evals.stats.set_metrics import Earlier, StatsJob, set_metrics
from evald.results.samples import SampleRecord

#: what the kinds themselves put beside the score.
VALUES: dict[str, dict[str, float]] = {
    "generate": {},
    "custom": {"turns": 2.0},
    "loglikelihood_choice": {"acc": 1.0, "acc_norm": 1.0, "gold_share": 0.5},
    "perplexity": {"nll": 7.0, "tokens": 5.0, "bytes": 9.0},
}


def write(path: Path, kind: str, digest: str, n_samples: int) -> str:
    scores = [0.0, 1.0, 1.0]
    samples: list[dict[str, Any]] = [
        {"question": str(q), "sample": n, "score": scores[q], "answer": str(q)}
        for q in range(len(scores))
        for n in range(n_samples)
    ]
    shared: dict[str, Any] = {
        "digest": digest,
        "config": "c",
        "status": "scored",
        "values": VALUES[kind],
    }
    shared |= {"n_tokens": 3, "weight_version": f"r:1:{digest}:n"}
    records = [msgspec.convert(one | shared, SampleRecord) for one in samples]
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return str(path)


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("n_samples", [1, 2])
def test_every_name_that_is_written_is_reserved(tmp_path: Path, kind: str, n_samples: int) -> None:
    n_samples = 1 if kind in {"perplexity", "loglikelihood_choice"} else n_samples
    old = write(tmp_path / "old.jsonl", kind, "11111111", n_samples)
    metrics = set_metrics(
        StatsJob(
            name="s",
            kind=kind,
            n_samples=n_samples,
            ks=[],
            questions=["0", "1", "2", "lost"],
            clusters=["", "", "", ""],
            journal=write(tmp_path / "now.jsonl", kind, "22222222", n_samples),
            digest="22222222",
            config="c",
            earlier=[Earlier(name, old, "11111111") for name in ("prev", "baseline")],
        )
    )
    names = [name.removeprefix("eval/s/") for name in metrics if name.startswith("eval/s/")]
    own = [name for name in names if name.partition("/")[0] not in VALUES[kind].keys() - {"tokens"}]
    assert len(own) > 10
    assert [name for name in own if not is_set_metric(name)] == []


def test_names_of_others_are_free() -> None:
    assert not any(map(is_set_metric, ("turns", "acc", "deltas", "ratio", "std")))
