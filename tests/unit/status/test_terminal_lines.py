from __future__ import annotations

import re

import pytest
from terminal_cases import NOW, a_point, a_view, an_alert, rows_of, some_points

from evald.point import Outcome
from evald.results.records import PointRecord
from evald.status.terminal.points import headlines
from evald.status.terminal.source import Recent, Shown
from evald.status.terminal.text import ASCII, UNICODE, width
from evald.status.view import EngineView, PointView, SetView
from evald.text import encode_json

SHOWN = Shown(view=a_view(), points=some_points(), alerts=[an_alert()])

WHOLE = """\
evald 0.1  serving  run demo  pid 42  up 1h02m  40 steps behind
engines    state       weights              in flight   tok/s   KV wait restarts
  engine-0 serving     demo:40:abcdef01:x9          8     812  43%    3        2
  engine-1 quarantined -                            0       -    -    -        0
    out of memory out of memory out of memory out of memory out of memory out of
    memory out of memory out of memory out of memory out of memory out of memory
    out of memory
running (1 of 2)
  demo step 40        evaluating  12s
    copy     ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆      100/100  0.250        done
    sort     ▆▆▆▆▆▆▆▆▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁       50/200  1.000  1m05s left
    add      ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁          0/0
regrade  run demo: 2 of 7 points, and 30 of 40 samples of the next one
queued (1)
  demo step 80 r1     queued      1m15s
last points of run demo, the newest ended 1m10s ago
             baseline          10          30   Δ prev  Δ base
                          partial
  copy     0.100±.020  0.250±.020  0.350±.020▲  +0.100  +0.250
  sort     0.500±.020  0.510±.020  0.500±.020   -0.010
  skipped 20 busy: 2 points are in flight
alerts
  10m00s  disk: it is nearly full
ended    3 ok, 0 partial, 1 skipped
disk     1.0 GiB of 100.0 GiB free, samples 5.0 GiB
staging  /staging: 2 snapshots, 3.0 MiB used, 5.0 TiB free
results  /results/results.jsonl (seq 9)
"""


def test_80_columns_show_everything_that_matters() -> None:
    assert rows_of(SHOWN) == WHOLE.splitlines()


@pytest.mark.parametrize("columns", [1, 3, 6, 20, 40, 80, 133, 250])
@pytest.mark.parametrize("rows", [None, 1, 5, 24, 60])
def test_nothing_is_wider_or_longer_than_the_terminal(columns: int, rows: int | None) -> None:
    drawn = rows_of(SHOWN, columns=columns, rows=rows)
    assert max(map(width, drawn)) <= columns
    if rows is not None:
        assert len(drawn) <= rows


@pytest.mark.parametrize(
    ("columns", "behind"),
    [
        (75, "8     812  43%    3        2"),
        (74, "8     812    3        2"),
        (70, "8     812    3        2"),
        (69, "8     812        2"),
        (64, "8     812"),
        (55, "8"),
        (47, ""),
        (38, ""),
    ],
)
def test_where_columns_are_few_whole_cells_of_engines_go(columns: int, behind: str) -> None:
    head, row, *_ = rows_of(SHOWN, columns=columns)[1:]
    assert re.fullmatch(rf"  engine-0 serving     40:abcdef01 *{re.escape(behind)}", row)
    assert len(head.split()) == 3 + len(behind.split()) + ("in flight" in head)
    assert "…" not in head + row


def test_where_rows_are_few_trouble_stays_and_what_is_hidden_is_counted() -> None:
    engines = [EngineView(name=f"engine-{i}", state="serving") for i in range(8)]
    engines.append(EngineView(name="engine-8", state="backoff", detail="process ended"))
    drawn = rows_of(Shown(view=a_view(engines=engines)), rows=16)
    assert len(drawn) == 16
    assert drawn[2].startswith("  engine-8 backoff")
    assert drawn[3] == "    process ended"
    assert any(re.fullmatch(r"  … \d more rows", row) for row in drawn)
    assert any(row.startswith("    sort") for row in drawn)


def test_where_there_is_room_sections_stand_apart() -> None:
    drawn = rows_of(SHOWN, rows=60)
    assert drawn.count("") == 6
    assert [row for row in drawn if row] == WHOLE.splitlines()


def test_an_idle_status_is_short_and_whole() -> None:
    idle = a_view(queued=[], running=[], ended={}, engines=[], staging=None, regrades=[], disk=None)
    idle.lag_steps, idle.listen = 0, "127.0.0.1:8008"
    assert rows_of(Shown(view=idle)) == [
        "evald 0.1  serving  run demo  pid 42  up 1h02m",
        "engines  none",
        "running (0 of 2)",
        "queued (0)",
        "ended    none",
        "results  /results/results.jsonl (seq 9)",
        "listens  127.0.0.1:8008 (with its token)",
    ]


def test_a_pause_is_told_right_below_the_first_line() -> None:
    view = a_view(state="paused", not_written="cannot write /r: No space left on device; " * 3)
    view.config_fault = "needs a restart: fleet.engines"
    drawn = rows_of(Shown(view=view))
    assert drawn[1].startswith("PAUSED: cannot write /r: No space")
    assert drawn[3] == "CONFIG: needs a restart: fleet.engines"


def test_long_names_lose_their_middle_so_that_they_stay_apart() -> None:
    sets = [SetView(name=f"aime_2024_in_german_version_{i}", done=1, total=2) for i in (1, 2)]
    point = PointView(
        run="r" * 100, step=1, revision=0, kind="step", state="evaluating", since_s=1, sets=sets
    )
    version = "a-long-run-name-of-a-user:1200:abcdef01:9f"
    urls = [f"http://10.0.0.1:30000/{'x' * 50}{i}" for i in (1, 2)]
    engines = [EngineView(name=url, state="serving", weight_version=version) for url in urls]
    drawn = rows_of(Shown(view=a_view(running=[point], engines=engines)))
    assert max(map(width, drawn)) <= 80
    assert [row.split()[0] for row in drawn if "aime" in row] == [
        f"aime_202…rsion_{i}" for i in (1, 2)
    ]
    shown = [row for row in drawn if "http" in row]
    assert [row.split()[0][-1] for row in shown] == ["1", "2"]
    assert "1200:abcdef01" in shown[0]


HOSTILE = "\x1b[2J\x1b]0;gone\x07\r\n\x00\u202e\u0301x\ud800"


def test_control_characters_never_reach_the_terminal() -> None:
    view = a_view(run=HOSTILE, results=HOSTILE, not_written=HOSTILE, state=HOSTILE, version=HOSTILE)
    engine = EngineView(name=HOSTILE, state=HOSTILE, weight_version=HOSTILE, detail=HOSTILE)
    one = SetView(name=HOSTILE, done=1, total=2)
    point = PointView(
        run=HOSTILE, step=1, revision=0, kind=HOSTILE, state="evaluating", since_s=1, sets=[one]
    )
    view.engines, view.running = [engine], [point]
    view.listen = HOSTILE
    ended = a_point(1, {HOSTILE: 0.5}, run=HOSTILE)
    skipped = a_point(2, {}, run=HOSTILE, outcome=Outcome.SKIPPED, reason=HOSTILE, detail=HOSTILE)
    alert = an_alert(name=HOSTILE, detail=HOSTILE)
    shown = Shown(view=view, points=[ended, skipped], alerts=[alert])
    for glyphs in (ASCII, UNICODE):
        drawn = rows_of(shown, glyphs=glyphs)
        # what is neither ours nor printable would move the cursor, or worse
        assert all(row.replace("\u0301", "").isprintable() for row in drawn)
        assert "\\x1b" in "".join(drawn)
        if glyphs is ASCII:
            assert all(row.isascii() for row in drawn)


def test_wide_names_keep_the_columns() -> None:
    sets = [SetView(name=name, done=1, total=2) for name in ("数学問題", "n\u0303", "plain")]
    point = PointView(
        run="r", step=1, revision=0, kind="step", state="evaluating", since_s=1, sets=sets
    )
    drawn = [row for row in rows_of(Shown(view=a_view(running=[point]))) if "1/2" in row]
    assert len({width(row[: row.index("1/2")]) for row in drawn}) == 1


def test_colours_say_what_is_well_and_what_is_not() -> None:
    drawn = "\n".join(rows_of(SHOWN, colour=True))
    for part in (
        "\x1b[32mserving\x1b[0m",
        "\x1b[31mquarantined\x1b[0m",
        "\x1b[32m▲\x1b[0m",
        "\x1b[31m     1.0 GiB of 100.0 GiB free\x1b[0m",
    ):
        assert part in drawn
    assert re.sub(r"\x1b\[\d+m", "", drawn) == WHOLE.removesuffix("\n")


def test_a_score_that_should_fall_is_green_when_it_falls() -> None:
    fell = {"eval/ppl/perplexity": 9.0, "eval/ppl/delta_prev": -0.2, "eval/ppl/delta_prev_p": 0.01}
    worse = {"eval/acc/delta_prev": -0.2, "eval/acc/delta_prev_stderr": 0.01}
    point = a_point(1, {"ppl": 2.2, "acc": 0.5}, metrics=fell | worse)
    drawn = rows_of(Shown(view=a_view(), points=[point]), colour=True)
    assert any("\x1b[32m▼" in row for row in drawn if "ppl" in row)
    assert any("\x1b[31m▼" in row for row in drawn if "acc" in row)


def test_more_columns_show_more_points_and_digits_are_never_cut() -> None:
    points = [a_point(step, {"reward": -1234.5 + step}) for step in range(20)]
    for columns, n_points in ((80, 3), (133, 7), (250, 15)):
        drawn = rows_of(Shown(view=a_view(), points=points), columns=columns)
        row = next(row for row in drawn if row.startswith("  reward"))
        assert row.split()[1:] == [f"{-1234.5 + s:.1f}±.020" for s in range(20 - n_points, 20)]


def test_old_alerts_are_no_news() -> None:
    shown = Shown(view=a_view(), alerts=[an_alert(age_s=90_000)])
    assert not any("nearly full" in row for row in rows_of(shown))


# --- the newest records


def encoded(*records: PointRecord) -> list[bytes]:
    return [encode_json(record) for record in records]


def test_of_each_step_the_newest_revision_counts_and_of_runs_the_one_that_ended_last() -> None:
    recent = Recent()
    other = a_point(5, {"a": 1.0}, run="other", record_id="other/step/5/r0")
    again = a_point(10, {"copy": 0.9}, revision=1, record_id="demo/step/10/r1")
    recent.take(encoded(other, *some_points(), again))
    recent.take([b"no json", b"[]", *encoded(some_points()[1])])  # a replay of the old revision
    assert [(p.kind, p.step, p.revision) for p in recent.points()] == [
        ("baseline", 0, 0),
        ("step", 10, 1),
        ("step", 20, 0),
        ("step", 30, 0),
    ]
    recent.take([encode_json(an_alert())])
    assert [alert.time for alert in recent.alerts()] == [NOW - 600]


def test_an_alert_that_is_over_is_no_news_and_may_come_again() -> None:
    drop = an_alert(name="drop", subject="eval/a", record_id="1")
    over = an_alert(name="drop", subject="eval/a", record_id="1/cleared", cleared=True)
    other = an_alert(name="drop", subject="eval/b", record_id="2")
    again = an_alert(name="drop", subject="eval/a", record_id="3")
    recent = Recent()
    recent.take([encode_json(one) for one in (drop, other, over)])
    assert [alert.record_id for alert in recent.alerts()] == ["2"]
    recent.take([encode_json(again)])
    assert [alert.record_id for alert in recent.alerts()] == ["2", "3"]


def test_headlines_are_the_scores_of_sets_and_aggregates() -> None:
    point = a_point(
        3,
        {"copy": 0.5, "all-sets": 0.7},
        metrics={
            "eval/copy/response_len/mean": 3.0,
            "eval/copy-maj@4": 1.0,
            "eval/copy-pass^2": 1.0,
            "eval/copy-none_reward_ratio": 0.0,
            "eval/duration_seconds": 9.0,
            "eval/skipped_busy": 1.0,
        },
    )
    assert headlines(point) == {"copy": 0.5, "all-sets": 0.7}
