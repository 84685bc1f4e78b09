"""Points that are killed or cut in the middle, in front of an engine that outlives the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

from rig import Rig, rig, until

from evald.results.records import PointRecord
from evald.testing import FakeEngine, serve_fake, write_base_model, write_snapshot

_QUESTIONS = 24
_ATTACHED = """
[attached]
model = "{{model}}"
urls = ["{url}"]
max_requests = 8
"""
_FUNCTION = """
async def ask(client, question):
    answer = await client.generate([{"role": "user", "content": question.prompt}])
    return answer.text
"""
#: of each kind: its table, and how many sequences one sample of it takes.
_KINDS = {
    "generate": ("n_samples_per_eval_prompt = 2", 1),
    "loglikelihood_choice": ('choices = "0123"', 4),
    "perplexity": ("", 1),
    "custom": ('function = "my_function:ask"', 1),
}


@contextlib.contextmanager
def engine(model: Path, *, delay_s: float) -> Iterator[tuple[FakeEngine, str]]:
    """Serve a fake engine from a thread: it is there before the daemon, and after it."""
    fake = FakeEngine(model, delay_s=delay_s, vary=2)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake engine")
    thread.start()
    server = asyncio.run_coroutine_threadsafe(serve_fake(fake), loop).result(10)
    try:
        yield fake, server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.process.stop(0.0), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def add_sets(r: Rig, *tables: str) -> None:
    """Put eval sets into the config; each has the same questions."""
    (r.work / "my_function.py").write_text(_FUNCTION)
    rows = [{"prompt": f"What of {i}?", "label": "1" if i % 3 else "2"} for i in range(_QUESTIONS)]
    (r.work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = r.config.read_text() + '[defaults]\ngrader = "boxed_exact"\nmax_response_len = 16\n'
    for table in tables:
        text += f'[[eval]]\npath = "rows.jsonl"\n{table}\n'
    r.config.write_text(text)


def abort_all(url: str) -> None:
    with contextlib.closing(HTTPConnection(url.removeprefix("http://"), timeout=10)) as server:
        server.request("POST", "/abort_request", json.dumps({"abort_all": True}))
        assert server.getresponse().status == 200


def attempts(fake: FakeEngine) -> Counter[str]:
    """Sequences that were asked for, by attempt on a point."""
    return Counter(rid.rsplit("-", 1)[0] for rid in fake.rids if rid.startswith("evald-"))


def journal(r: Rig, name: str) -> Path:
    return r.work / "results" / "samples" / "t" / "step_1.r0" / f"{name}.jsonl"


def scored(r: Rig, name: str) -> list[str]:
    path = journal(r, name)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("}\n") and '"status":"scored"' in line]


def begun_sets(r: Rig) -> set[str]:
    return {kind for kind in _KINDS if scored(r, kind)}


def asked_more(fake: FakeEngine, than: int) -> bool:
    return attempts(fake).total() > than


def another_began(r: Rig, before: set[str]) -> bool:
    return begun_sets(r) > before


def numbers(point: PointRecord) -> dict[str, float]:
    """The metrics that depend on the samples alone."""
    other = ("/delta_", "/weight_version/", "eval/step", "eval/lag", "eval/duration")
    return {
        name: value
        for name, value in point.metrics.items()
        if not any(part in name for part in other)
    }


def test_after_kill_9_only_the_rest_is_asked_and_the_numbers_are_the_same(tmp_path: Path) -> None:
    model = write_base_model(tmp_path / "base")
    sets = [f'name = "{kind}"\nkind = "{kind}"\n{table}' for kind, (table, _) in _KINDS.items()]
    with (
        engine(model, delay_s=0.25) as (fake, url),
        rig(tmp_path, model=model, posture=_ATTACHED.format(url=url), sets=False) as r,
    ):
        add_sets(r, *sets)
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        totals = {kind: _QUESTIONS * (2 if kind == "generate" else 1) for kind in _KINDS}
        begun: set[str] = set()
        kept = dict.fromkeys(_KINDS, 0)
        before: Counter[str] = Counter()
        while begun < _KINDS.keys():
            # sets are asked one after the other: each is killed in its middle
            rest = sum((totals[kind] - kept[kind]) * _KINDS[kind][1] for kind in begun)
            until(partial(asked_more, fake, before.total() + rest), "a set is asked", 60)
            fake.delay_s = 60.0
            until(partial(another_began, r, begun), "its first answers are in the journal", 60)
            r.kill()
            abort_all(url)  # as SGLang does when a client is gone
            fake.delay_s = 0.25
            begun = begun_sets(r)
            kept = {kind: len(scored(r, kind)) for kind in _KINDS}
            before = attempts(fake)
            for kind in begun:  # a killed daemon may leave half a line
                with journal(r, kind).open("ab") as file:
                    file.write(b'{"question":"1","sample":0,"dig')
            if begun == _KINDS.keys():
                fake.delay_s = 0.0
            r.start()
        point = r.point(1, timeout_s=60)
        assert (str(point.outcome), point.counts.n_resumed) == ("ok", sum(kept.values()))
        assert point.counts.n_total == point.counts.n_scored == sum(totals.values())
        rest = sum((totals[kind] - kept[kind]) * width for kind, (_, width) in _KINDS.items())
        assert list((attempts(fake) - before).values()) == [rest]
        assert 0 < rest < _QUESTIONS * 5
        write_snapshot(r.root / "step_2", seed=2, answer=7)
        whole = r.point(2, timeout_s=60)
        assert whole.counts.n_resumed == 0
        assert numbers(point) == numbers(whole)
        assert 0 < point.metrics["eval/generate"] < 1


def test_stragglers_are_aborted_at_the_engine_and_never_count(tmp_path: Path) -> None:
    model = write_base_model(tmp_path / "base")
    with (
        engine(model, delay_s=0.2) as (fake, url),
        rig(
            tmp_path,
            model=model,
            posture=_ATTACHED.format(url=url),
            sets=False,
            dispatch="min_done_share = 0.1",
        ) as r,
    ):
        add_sets(r, 'name = "cut"\nstragglers = "cut"\ncut_after_s = 1.5')
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        until(lambda: attempts(fake).total() > 8, "some are answered")
        fake.delay_s = 60.0
        point = r.point(1)
        counts = point.counts
        assert str(point.outcome) == "partial"
        assert counts.n_scored >= 8
        assert counts.n_cut == counts.n_timeout == _QUESTIONS - counts.n_scored > 0
        assert f"{counts.n_scored} of {_QUESTIONS} samples were done" in point.detail
        assert "ended by cut_after_s = 1.5" in point.detail
        low, high = (point.metrics[f"eval/cut/score_{end}"] for end in ("low", "high"))
        assert low == point.metrics["eval/cut"]
        assert abs(high - low - counts.n_cut / _QUESTIONS) < 1e-9
        (attempt,) = attempts(fake)
        until(lambda: fake.aborted, "what runs is aborted")
        assert all(rid.startswith(attempt) for rid in fake.aborted)
        fake.delay_s = 0.0
        # the next point does not wait for them
        write_snapshot(r.root / "step_2", seed=2, answer=7)
        assert str(r.point(2).outcome) == "ok"
        assert len(scored(r, "cut")) == counts.n_scored


def used_s(r: Rig) -> float:
    """Seconds that the running set has had, as the daemon has noted them."""
    path = r.work / "results" / "time_used.json"
    times = json.loads(path.read_bytes()) if path.exists() else {}
    return float(times.get("t/step/1/r0", {}).get("cut", 0.0))


def test_a_daemon_that_is_killed_again_and_again_still_ends_its_point(tmp_path: Path) -> None:
    model = write_base_model(tmp_path / "base")
    with (
        engine(model, delay_s=1.5) as (fake, url),
        rig(
            tmp_path,
            model=model,
            posture=_ATTACHED.format(url=url),
            sets=False,
            dispatch="min_done_share = 0.01",
        ) as r,
    ):
        add_sets(r, 'name = "cut"\nstragglers = "cut"\ncut_after_s = 7.0')
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        for life in range(1, 4):  # each is less than half of what the set may take
            r.start()
            if life == 1:
                until(lambda: len(scored(r, "cut")) >= 8, "some are answered")
                fake.delay_s = 60.0
            until(lambda: used_s(r) > 1.5 * life, "it takes its time")  # noqa: B023 (at once)
            assert not r.points()
            r.kill()
            abort_all(url)
        r.start()
        point = r.point(1, timeout_s=30)
        assert str(point.outcome) == "partial"
        assert point.counts.n_resumed >= 8
        assert "ended by cut_after_s = 7" in point.detail
