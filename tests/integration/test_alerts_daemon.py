"""A daemon that is watched: /metrics on both listeners, alerts in ledger and webhook, restarts."""

from __future__ import annotations

import http.client
import http.server
import json
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse
from rig import Rig, ask, rig, until

from evald.results.records import Alert
from evald.testing import write_snapshot
from evald.testing.fake_launcher import write_fake_python

TOKEN = secrets.token_urlsafe()
RULES = """
[[alert]]
name = "fell"
kind = "drop"
[[alert]]
name = "evald"
kind = "builtin"
[webhook]
url_env = "EVALD_TEST_HOOK"
"""
MORE = """
[[alert]]
name = "low"
kind = "drop"
metrics = ["eval/a"]
against = "best"
"""


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What a receiver got; where it listens stands in the environment."""
    got: list[dict[str, Any]] = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("EVALD_TEST_HOOK", f"http://127.0.0.1:{server.server_port}/{TOKEN}")
        yield got
        server.shutdown()


def alerts(r: Rig) -> list[str]:
    return [
        f"{record.name} {record.subject}{' over' if record.cleared else ''}"
        for record in r.records()
        if isinstance(record, Alert)
    ]


def metrics(page: bytes) -> dict[str, float]:
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in parse(page.decode())
        for sample in family.samples
    }


def over_tcp(r: Rig, token: str | None) -> tuple[int, bytes]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with closing(http.client.HTTPConnection(r.status()["listen"], timeout=10)) as connection:
        connection.request("GET", "/metrics", headers=headers)
        response = connection.getresponse()
        return response.status, response.read()


def check_metrics(r: Rig) -> None:
    """After two points of 60 samples each: the same page on both listeners."""
    assert over_tcp(r, None)[0] == 401
    assert over_tcp(r, TOKEN + "x")[0] == 401
    code, page = over_tcp(r, TOKEN)
    assert code == 200
    assert metrics(page).keys() == metrics(ask(r.work / "evald.sock", "/metrics")).keys()
    found = metrics(page)
    for name, value in {
        "evald_points_total ok ": 2,
        "evald_points_total skipped busy": 0,
        "evald_point_stage_duration_seconds_count pin": 2,
        "evald_samples_total scored": 120,
        "evald_alerts_total fell": 2,
        "evald_alerts_total snapshot_misnamed": 1,
        "evald_state serving": 1,
        "evald_engine_state engine-0 serving": 1,
        "evald_engine_answers_total engine-0": 120,
        "evald_lag_steps": 0,
        "evald_last_point_timestamp_seconds": r.point(2).time,
    }.items():
        assert found[name] == value, name
    assert found["evald_engine_generated_tokens_total engine-0"] > 120
    assert found["evald_engine_prompt_tokens_total engine-0"] > 120
    assert found["evald_staging_free_bytes"] > 0
    assert found["evald_results_free_bytes"] > 0
    assert found["evald_event_loop_lag_seconds_count"] > 0


def test_a_watched_daemon(tmp_path: Path, hook: list[dict[str, Any]]) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    status = f'listen = "127.0.0.1:0"\ntoken_file = "{token_file}"'
    python = write_fake_python(tmp_path / "python")
    with rig(tmp_path, python=python, questions=30, tables=RULES, status=status) as r:
        r.start()
        write_snapshot(r.root / "step_1", answer=7)
        assert r.point(1).metrics["eval/a"] == 1.0
        write_snapshot(r.root / "step_2", seed=2, answer=8)
        assert r.point(2).metrics["eval/a"] == 0.0
        (r.root / "odd_name").mkdir()
        (r.root / "odd_name" / ".complete").touch()

        # what fell, and what evald records by itself
        told = ["fell eval/a@2.r0", "fell eval/b@2.r0", "snapshot_misnamed "]
        until(lambda: sorted(alerts(r)) == told, "the alerts are recorded")
        until(lambda: len(hook) == 3, "and posted")
        assert {one["name"] for one in hook} == {"fell", "snapshot_misnamed"}
        [posted] = [one for one in hook if one["subject"] == "eval/a@2.r0"]
        assert posted["detail"].startswith(
            "eval/a at step 2 is worse than the point before (step 1): 0 against 1, "
        )
        assert posted["text"] == f"evald t: alert fell: {posted['detail']}"

        check_metrics(r)

        # the ledger remembers what was told and counted
        r.kill()
        r.start()
        write_snapshot(r.root / "step_3", seed=3, answer=8)
        r.point(3)
        found = metrics(over_tcp(r, TOKEN)[1])
        assert found["evald_points_total ok "] == 3
        assert found["evald_engine_answers_total engine-0"] == 60

        # another rule, while it runs: what it finds is so now
        r.config.write_text(r.config.read_text().replace("[webhook]", f"{MORE}[webhook]"))
        assert r.daemon is not None
        r.daemon.send_signal(signal.SIGHUP)
        until(lambda: "low eval/a" in alerts(r), "the new rule speaks")
        write_snapshot(r.root / "step_4", seed=4, answer=7)
        until(lambda: "low eval/a over" in alerts(r), "it is over")
        assert [one for one in alerts(r) if one.startswith("fell")] == told[:2]
        # (beside them evald's own, of the directory that lies there still: said in each life)
        until(lambda: [x["cleared"] for x in hook if x["name"] == "low"] == [False, True], "posted")
        assert r.stop() == 0

        for path in [r.results, *tmp_path.glob("evald.*.log")]:
            assert TOKEN not in path.read_text()


def test_a_missing_secret_is_known_before_the_start(tmp_path: Path) -> None:
    with rig(tmp_path, python=write_fake_python(tmp_path / "python"), tables=RULES) as r:
        done = r.evald("check", str(r.config))
        assert done.returncode == 78
        assert "webhook.url_env: environment variable EVALD_TEST_HOOK is not set" in done.stderr


def test_scraping_under_load_costs_no_point(tmp_path: Path) -> None:
    python = write_fake_python(tmp_path / "python", delay_s=0.01)
    with rig(tmp_path, python=python, questions=300) as r:
        r.start()
        write_snapshot(r.root / "step_1", answer=7)
        pages = 0
        while not r.points():
            found = metrics(ask(tmp_path / "evald.sock", "/metrics"))
            assert found["evald_points_in_flight_limit"] == 2
            pages += 1
        assert pages > 5
        point = r.point(1)
        assert (point.outcome, point.counts.n_scored) == ("ok", 600)
        assert r.stop() == 0


def test_the_last_point_of_a_run_is_told_though_the_daemon_stops_at_once(
    tmp_path: Path, hook: list[dict[str, Any]]
) -> None:
    with rig(
        tmp_path, python=write_fake_python(tmp_path / "python"), questions=30, tables=RULES
    ) as r:
        daemon = r.start("--exit-on-run-end")
        write_snapshot(r.root / "step_1", answer=7)
        r.point(1)
        write_snapshot(r.root / "step_2", seed=2, answer=8)
        (r.root / "run.end").write_text('{"last_step": 2}')
        assert daemon.wait(60) == 0
        assert sorted(alerts(r)) == ["fell eval/a@2.r0", "fell eval/b@2.r0"]
        assert sorted(one["subject"] for one in hook) == ["eval/a@2.r0", "eval/b@2.r0"]
