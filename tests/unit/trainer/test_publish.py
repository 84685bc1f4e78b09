"""The publishing protocol: hidden, renamed, marked last; a failure leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from evald.staging.manifest import parse_manifest
from evald.staging.words import RunEndWord, SkipWord, read_word
from evald.trainer.publish import (
    PublishError,
    StillEvaluating,
    end_run,
    ended,
    publish,
    skip,
)


def build(directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    shard = directory / "model.safetensors"
    shard.write_bytes(b"weights")
    shard.chmod(0o600)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write_status(root: Path, beat: int, **points: list[dict[str, Any]]) -> None:
    board = root / ".evald"
    board.mkdir(exist_ok=True)
    status = {"beat": beat, "queued": [], "running": [], **points}
    fresh = board / "new"
    fresh.write_text(json.dumps(status))
    fresh.replace(board / "status.json")


def test_snapshot_is_complete_and_its_manifest_true(tmp_path: Path) -> None:
    target = publish(build, tmp_path, 40, run="r1", final=True, stall_s=0.25)
    assert target == tmp_path / "step_40"
    assert names(tmp_path) == {"step_40"}
    manifest = json.loads((target / ".complete").read_bytes())
    assert manifest.pop("export_s") >= 0
    assert manifest == {
        "schema": 1,
        "run": "r1",
        "step": 40,
        "files": {
            "config.json": {"size": 2, "xxh3": xxhash.xxh3_64_hexdigest(b"{}")},
            "model.safetensors": {"size": 7, "xxh3": xxhash.xxh3_64_hexdigest(b"weights")},
        },
        "stall_s": 0.25,
        "final": True,
    }


def test_nothing_is_visible_while_it_is_written(tmp_path: Path) -> None:
    seen: list[str] = []

    def watched(directory: Path) -> None:
        assert directory.parent == tmp_path
        seen.extend(names(tmp_path))
        build(directory)
        (directory / ".complete").write_text("too early")

    target = publish(watched, tmp_path, 1, hashes=False)
    assert [name[0] for name in seen] == ["."]
    manifest = json.loads((target / ".complete").read_bytes())
    assert manifest["files"]["config.json"] == {"size": 2}
    assert manifest["stall_s"] == manifest["export_s"]
    assert "run" not in manifest


def test_marker_comes_after_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace
    seen: list[set[str]] = []

    def spy(self: Path, target: Path) -> Path:
        seen.append(names(tmp_path / "step_1"))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", spy)
    publish(build, tmp_path, 1)
    assert seen == [{"config.json", "model.safetensors"}]


def test_other_users_can_read_files_and_a_writing_group_can_delete(tmp_path: Path) -> None:
    def nested(directory: Path) -> None:
        build(directory)
        (directory / "sub").mkdir(mode=0o700)
        (directory / "sub" / "part").write_bytes(b"1")
        (directory / "link").symlink_to("config.json")

    before = os.umask(0o077)
    try:
        private = publish(nested, tmp_path / "a", 1)
        (tmp_path / "b").mkdir()
        (tmp_path / "b").chmod(0o2770)
        shared = publish(nested, tmp_path / "b", 1)
    finally:
        os.umask(before)
    for path in ("model.safetensors", "config.json", "sub/part", ".complete"):
        assert mode(private / path) == 0o644
    assert mode(private) & 0o777 == mode(private / "sub") & 0o777 == 0o755
    assert mode(shared) & 0o777 == mode(shared / "sub") & 0o777 == 0o775


def test_nested_pattern(tmp_path: Path) -> None:
    target = publish(build, tmp_path, 5, pattern="global_step_{step}/actor/hf", marker="STABLE")
    assert target == tmp_path / "global_step_5" / "actor" / "hf"
    assert (target / "STABLE").exists()
    assert names(tmp_path) == {"global_step_5"}


def test_nested_pattern_is_open_all_the_way(tmp_path: Path) -> None:
    (tmp_path / "global_step_6").mkdir(mode=0o700)
    before = os.umask(0o077)
    try:
        for step in (5, 6):
            publish(build, tmp_path, step, pattern="global_step_{step}/actor/hf")
    finally:
        os.umask(before)
    opened = (
        "global_step_5",
        "global_step_5/actor",
        "global_step_5/actor/hf",
        "global_step_6/actor",
    )
    assert [mode(tmp_path / path) for path in opened] == [0o755] * 4
    assert mode(tmp_path / "global_step_6") == 0o700  # somebody else's


@pytest.mark.parametrize("pattern", ["../step_{step}", "a/../../step_{step}", "/step_{step}"])
def test_pattern_that_leads_out_of_the_root(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ValueError, match="leads out of the root"):
        publish(build, tmp_path / "root", 1, pattern=pattern)
    with pytest.raises(ValueError, match="leads out of the root"):
        skip(tmp_path / "root", 1, "busy", pattern=pattern)
    assert names(tmp_path) == set()


def test_root_without_a_name() -> None:
    with pytest.raises(ValueError, match='the root is ""'):
        publish(build, "", 1)
    with pytest.raises(ValueError, match='the root is ""'):
        end_run("", 1)


def raise_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_file_system_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def fills_up(directory: Path) -> None:
        build(directory)
        raise_full()

    with pytest.raises(OSError, match="No space left"):
        publish(fills_up, tmp_path, 1)
    assert names(tmp_path) == set()


def test_full_file_system_at_the_marker_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_text(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(Path, "write_text", raise_full)
    with pytest.raises(OSError, match="No space left"):
        publish(without_text, tmp_path, 1)
    assert names(tmp_path) == set()


def test_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(directory: Path) -> None:
        build(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(interrupted, tmp_path, 1)
    assert names(tmp_path) == set()


def test_leftovers_of_a_killed_export_go_with_the_next_of_that_step(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step_1.dead").mkdir()
    (tmp_path / ".tmp-step_1.dead" / "shard").write_bytes(b"1")
    (tmp_path / ".tmp-step_1.file").write_bytes(b"1")
    (tmp_path / ".tmp-step_10.alive").mkdir()
    publish(build, tmp_path, 1)
    assert names(tmp_path) == {"step_1", ".tmp-step_10.alive"}


def test_again_the_old_snapshot_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    target = publish(build, tmp_path, 1)
    (target / "old").write_text("old")

    def again(directory: Path) -> None:
        build(directory)
        assert (target / ".complete").exists()

    publish(again, tmp_path, 1)
    assert names(target) == {"config.json", "model.safetensors", ".complete"}
    assert names(tmp_path) == {"step_1"}


@pytest.mark.parametrize("again", [raise_full, lambda _: None])
def test_again_that_fails_leaves_the_old_snapshot(
    tmp_path: Path, again: Callable[[Path], None]
) -> None:
    target = publish(build, tmp_path, 1)
    for _ in range(2):  # and nothing stays locked
        with pytest.raises((OSError, PublishError)):
            publish(again, tmp_path, 1)
        assert names(target) == {"config.json", "model.safetensors", ".complete"}
    assert names(tmp_path) == {"step_1"}


def test_again_that_finds_no_room_for_its_marker_leaves_the_old_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = publish(build, tmp_path, 1)
    (target / "old").write_text("old")
    monkeypatch.setattr("evald.trainer.publish.draft.write_atomically", raise_full)
    with pytest.raises(OSError, match="No space"):
        publish(build, tmp_path, 1)
    assert names(target) == {"config.json", "model.safetensors", ".complete", "old"}
    assert names(tmp_path) == {"step_1"}


def test_again_waits_for_a_point_that_began_while_it_was_written(tmp_path: Path) -> None:
    target = publish(build, tmp_path, 1)
    (target / "old").write_text("old")

    def again(directory: Path) -> None:
        build(directory)
        write_status(tmp_path, 1, running=[{"step": 1, "run": "r"}])

    with pytest.raises(StillEvaluating, match="step 1 again"):
        publish(again, tmp_path, 1, busy_timeout_s=0.1)
    assert {".complete", "old"} < names(target)


@pytest.mark.parametrize("root", ["http://evalnode:8008", "evalnode:/dev/shm/evald"])
def test_root_on_another_host(root: str) -> None:
    with pytest.raises(ValueError, match=r"not on this host.*destination=.*url="):
        publish(build, root, 1)


def test_only_the_last_part_of_a_root_is_made(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match=r"there is no directory .*nope; give the directory"):
        publish(build, tmp_path / "nope" / "evald", 1)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("reason", ["Out Of Memory", "", "1st", "oom\n", "a" * 65])
def test_reason_that_evald_would_not_read(tmp_path: Path, reason: str) -> None:
    with pytest.raises(ValueError, match="small letters, digits and _"):
        skip(tmp_path, 41, reason)
    assert names(tmp_path) == set()


def test_again_waits_for_the_point_and_then_gives_up(tmp_path: Path) -> None:
    target = publish(build, tmp_path, 1)
    write_status(tmp_path, 1, running=[{"step": 1, "run": "r"}])
    with pytest.raises(StillEvaluating, match="step 1 again: evald has not ended its point"):
        publish(build, tmp_path, 1, busy_timeout_s=0.2)
    assert (target / ".complete").exists()


def test_again_goes_on_as_soon_as_the_point_has_ended(tmp_path: Path) -> None:
    publish(build, tmp_path, 1)
    write_status(tmp_path, 1, queued=[{"step": 1, "run": "r"}])
    end = threading.Timer(0.3, write_status, (tmp_path, 2))
    end.start()
    started = time.monotonic()
    publish(build, tmp_path / ".", 1, run="r")
    end.join()
    assert 0.2 < time.monotonic() - started < 5


def test_again_never_waits_for_a_daemon_whose_beat_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended, "_DEAD_AFTER_S", 0.2)
    run_root = tmp_path / "r"
    publish(build, run_root, 1)
    write_status(tmp_path, 7, running=[{"step": 1, "run": "r"}])
    publish(build, run_root, 1, run="r", busy_timeout_s=30)


@pytest.mark.parametrize(
    "status", ["{", '{"beat": 1}', '{"queued": [3], "running": []}', '{"queued": [{"step": 1}]}']
)
def test_again_ignores_what_is_no_status(tmp_path: Path, status: str) -> None:
    publish(build, tmp_path, 1)
    (tmp_path / ".evald").mkdir()
    (tmp_path / ".evald" / "status.json").write_text(status)
    publish(build, tmp_path, 1, busy_timeout_s=0.1)


def test_point_of_another_run_holds_the_step_in_the_same_root(tmp_path: Path) -> None:
    target = publish(build, tmp_path, 1)
    write_status(tmp_path, 1, running=[{"step": 1, "run": "other"}])
    with pytest.raises(StillEvaluating, match="step 1 again"):
        publish(build, tmp_path, 1, run="r", busy_timeout_s=0.1)
    assert (target / ".complete").exists()


def test_points_of_other_steps_and_folders_do_not_hold(tmp_path: Path) -> None:
    publish(build, tmp_path, 1)
    write_status(tmp_path, 1, running=[{"step": 2, "run": "r"}])
    publish(build, tmp_path, 1, run="r", busy_timeout_s=0.1)
    publish(build, tmp_path / "folder", 1, run="r")
    write_status(tmp_path, 1, running=[{"step": 1, "run": "other"}])
    publish(build, tmp_path / "folder", 1, run="r", busy_timeout_s=0.1)


@pytest.mark.parametrize("holder", ["folder", "earlier"])
def test_folder_is_held_by_the_run_that_published_there(tmp_path: Path, holder: str) -> None:
    publish(build, tmp_path / "folder", 1, run="earlier")
    write_status(tmp_path, 1, queued=[{"step": 1, "run": holder}])
    with pytest.raises(StillEvaluating):
        publish(build, tmp_path / "folder", 1, run="r", busy_timeout_s=0.1)


@pytest.mark.timeout(20)
def test_status_that_is_a_fifo_or_a_folder_holds_nobody_up(tmp_path: Path) -> None:
    publish(build, tmp_path, 1)
    (tmp_path / ".evald").mkdir()
    os.mkfifo(tmp_path / ".evald" / "status.json")
    publish(build, tmp_path, 1, busy_timeout_s=0.1)
    (tmp_path / ".evald" / "status.json").unlink()
    (tmp_path / ".evald" / "status.json").mkdir()
    publish(build, tmp_path, 1, busy_timeout_s=0.1)


def test_the_reader_understands_what_is_written(tmp_path: Path) -> None:
    target = publish(build, tmp_path, 3, run="r", final=True, stall_s=0.5)
    manifest = parse_manifest((target / ".complete").read_bytes(), name=".complete", step=3)
    assert (manifest.run, manifest.final, manifest.stall_s) == ("r", True, 0.5)
    assert manifest.is_hashed
    assert read_word(skip(tmp_path, 4, "busy", "why"), SkipWord) == SkipWord("busy", "why")
    assert read_word(end_run(tmp_path, 4, run="r"), RunEndWord) == RunEndWord(4, "r")


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="nothing was written"):
        publish(lambda _: None, tmp_path, 1)
    with pytest.raises(PublishError, match='pattern "step" lacks'):
        publish(build, tmp_path, 1, pattern="step")
    with pytest.raises(PublishError, match="step -1"):
        publish(build, tmp_path, -1)
    assert names(tmp_path) == set()


def test_skip_and_run_end(tmp_path: Path) -> None:
    path = skip(tmp_path, 41, "no_space", "the tmpfs is full")
    assert path == tmp_path / "step_41.skip"
    assert json.loads(path.read_bytes()) == {"reason": "no_space", "detail": "the tmpfs is full"}
    assert end_run(tmp_path, 41) == tmp_path / "run.end"
    assert json.loads((tmp_path / "run.end").read_bytes()) == {"last_step": 41}
    assert names(tmp_path) == {"step_41.skip", "run.end"}
    assert json.loads(skip(tmp_path, 3, "busy", run="r").read_bytes())["run"] == "r"
    assert json.loads(end_run(tmp_path, 3, run="r").read_bytes())["run"] == "r"
    assert mode(path) == 0o644
