import json
import os
from pathlib import Path

import pytest
from staging_cases import as_other_user, base_model, open_folder, snapshot, staging

from evald.point import Kind, PointKey
from evald.staging.candidate import Candidate, Reader
from evald.staging.offers import RunEnded, TrainerSkip
from evald.staging.scan import Layout, scan
from evald.staging.words import BrokenWord, Listener, RunEndWord, read_word


def hear(root: Path, name: str, content: object) -> Candidate | TrainerSkip | RunEnded:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    config = staging(root)
    layout = Layout(config)
    listener = Listener(
        Reader(config, layout, "run", base_model()),
        root=root,
        run="run",
        base_dir=root.parent / "base",
        baseline_step=-1,
    )
    (file,) = (file for file in scan(layout).files if file.path == path)
    return listener.hear(file)


def test_a_skip(tmp_path: Path) -> None:
    skip = hear(tmp_path, "step_41.skip", {"reason": "no_space", "detail": "full", "more": 1})
    assert skip == TrainerSkip(PointKey("run", 41), "no_space", "full", tmp_path / "step_41.skip")
    skip = hear(tmp_path, "other/step_41.skip", {"reason": "busy"})
    assert isinstance(skip, TrainerSkip)
    assert skip.key == PointKey("other", 41)
    skip = hear(tmp_path, "other/step_42.skip", {"reason": "busy", "run": "third"})
    assert isinstance(skip, TrainerSkip)
    assert skip.key == PointKey("third", 42)


def test_a_run_end(tmp_path: Path) -> None:
    assert hear(tmp_path, "run.end", {"last_step": 9}) == RunEnded("run", 9, tmp_path / "run.end")


def test_a_baseline_request(tmp_path: Path) -> None:
    snapshot(tmp_path / "base")
    found = hear(tmp_path / "root", "a.request", {"kind": "baseline"})
    assert isinstance(found, Candidate)
    assert (found.kind, found.step, found.run) == (Kind.BASELINE, -1, "run")
    assert found.directory == tmp_path / "base"
    assert not found.owned
    assert found.fingerprint
    assert found.request == tmp_path / "root" / "a.request"
    found = hear(tmp_path / "root", "a.request", {"kind": "baseline", "step": 5})
    assert isinstance(found, Candidate)
    assert found.step == 5


@pytest.mark.parametrize("absolute", [True, False])
def test_a_reuse_request(tmp_path: Path, absolute: bool) -> None:
    snapshot(tmp_path / "old" / "step_3")
    path = str(tmp_path / "old" / "step_3") if absolute else "../old/step_3"
    found = hear(tmp_path / "root", "r/a.request", {"kind": "reuse", "step": 3, "path": path})
    assert isinstance(found, Candidate)
    assert (found.kind, found.step, found.run, found.fault) == (Kind.STEP, 3, "r", "")
    assert found.directory.samefile(tmp_path / "old" / "step_3")


def test_a_request_for_nothing(tmp_path: Path) -> None:
    found = hear(tmp_path, "a.request", {"kind": "reuse", "step": 3, "path": "/no/where"})
    assert isinstance(found, Candidate)
    assert found.fault == (
        "cannot use snapshot /no/where, which a.request asks for: there is no such directory"
    )


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/", "it has no *.safetensors file; name the snapshot's own directory"),
        ("x" * 300, "File name too long"),
        ("x/" * 3000, "File name too long"),
        ("a.request", "there is no such directory"),
        ("link", "its path is not UTF-8; rename it"),
    ],
)
def test_a_request_for_what_is_no_snapshot(tmp_path: Path, path: str, sentence: str) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    snapshot(Path(odd))
    (tmp_path / "link").symlink_to(odd)
    found = hear(tmp_path, "a.request", {"kind": "reuse", "step": 3, "path": path})
    assert isinstance(found, Candidate)
    assert found.fault.endswith(f"which a.request asks for: {sentence}")
    assert found.fingerprint == ""


def test_a_request_for_a_directory_that_may_not_be_read() -> None:
    with open_folder() as folder:
        closed = snapshot(folder / "closed" / "step_3")
        closed.parent.chmod(0)
        printed = as_other_user("print(words._no_snapshot(Path(sys.argv[1])))", closed)
    assert printed == "Permission denied"


def test_a_word_that_became_a_pipe_blocks_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.end")
    with pytest.raises(BrokenWord):
        read_word(tmp_path / "run.end", RunEndWord)


def test_a_shared_request_is_refused(tmp_path: Path) -> None:
    found = hear(tmp_path, "a.request", {"kind": "shared", "step": 3, "weight_version": "x"})
    assert isinstance(found, TrainerSkip)
    assert found.reason == "unhealthy"
    assert "no shared posture configured" in found.detail


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("step_1.skip", "", "cannot understand {}: Input data was truncated; write e.g. "),
        ("step_1.skip", {"reason": "Not/ok"}, "$.reason"),
        ("step_1.skip", {}, "`reason`"),
        ("step_1.skip", {"reason": "busy", "run": "../x"}, "$.run"),
        ("run.end", {"last_step": "x"}, "$.last_step"),
        ("a.request", {"kind": "other"}, "$.kind"),
        ("a.request", {"kind": "reuse", "path": "x"}, "it names no step"),
        ("a.request", {"kind": "reuse", "step": 1}, "it names no path to reuse"),
        ("a.request", "[" * 100_000, "cannot understand {}"),
        ("a.request", {"kind": "reuse", "step": 1, "path": "a\0b"}, "cannot understand path in {}"),
        ("a.request", {"kind": "reuse", "step": 10**15, "path": "x"}, "$.step"),
        ("a.request", '{"kind": "reuse", "path": "x", "step": ' + "9" * 400 + "}", "$.step"),
        ("run.end", {"last_step": 10**300}, "$.last_step"),
        # a "$" would let one more newline through
        ("step_1.skip", {"reason": "busy\n"}, "$.reason"),
        ("step_1.skip", {"reason": "busy", "run": "x\n"}, "$.run"),
    ],
)
def test_broken_words_are_told(tmp_path: Path, name: str, content: object, sentence: str) -> None:
    with pytest.raises(BrokenWord) as caught:
        hear(tmp_path, name, content)
    assert sentence.format(tmp_path / name) in str(caught.value)


def test_an_unreadable_word_is_told() -> None:
    with open_folder() as folder:
        (folder / "step_1.skip").touch(mode=0)
        printed = as_other_user(
            """
try:
    words.read_word(Path(sys.argv[1]), words.SkipWord)
except words.BrokenWord as error:
    print(error)
""",
            folder / "step_1.skip",
        )
    assert "Permission denied; write it with mode 0644" in printed
