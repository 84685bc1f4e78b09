import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from staging_cases import FUZZ, as_other_user, open_folder, staging

from evald.staging import scan as scan_module
from evald.staging.scan import Found, Layout, Unfinished, scan


def look(root: Path, **config: object) -> Found:
    return scan(Layout(staging(root, **config)))


def mark(directory: Path, marker: str = ".complete", mtime_s: int = 100) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / marker).touch()
    os.utime(directory / marker, (mtime_s, mtime_s))
    return directory


def test_snapshots_are_found_in_the_order_of_their_markers(tmp_path: Path) -> None:
    mark(tmp_path / "step_3", mtime_s=100)
    mark(tmp_path / "step_20", mtime_s=90)
    mark(tmp_path / "step_1", mtime_s=100)
    mark(tmp_path / "other" / "step_7", mtime_s=80)
    (tmp_path / "step_9").mkdir()
    found = look(tmp_path)
    assert [(one.folder_run, one.step) for one in found.marked] == [
        ("other", 7),
        (None, 20),
        (None, 1),
        (None, 3),
    ]
    assert list(found.unmarked) == [tmp_path / "step_9"]
    assert set(found.folders) == {tmp_path, tmp_path / "other"}
    assert found.free_bytes > 0
    assert look(tmp_path).marked == found.marked


def test_an_identity_tells_states_apart(tmp_path: Path) -> None:
    directory = mark(tmp_path / "step_1")
    seen = {look(tmp_path).marked[0].identity}
    (directory / ".complete").write_text("{}")
    seen.add(look(tmp_path).marked[0].identity)
    os.utime(directory / ".complete", (1, 1))
    seen.add(look(tmp_path).marked[0].identity)
    directory.rename(tmp_path / "step_2")
    mark(directory).joinpath(".complete").unlink()
    (tmp_path / "step_2" / ".complete").rename(directory / ".complete")
    seen.add(look(tmp_path).marked[0].identity)
    assert len(seen) == 4


def test_what_is_no_snapshot_is_passed_over(tmp_path: Path) -> None:
    mark(tmp_path / ".step_1")
    mark(tmp_path / "step_x")
    mark(tmp_path / "step_1.tmp")
    mark(tmp_path / "run" / "deeper" / "step_1")
    (tmp_path / "step_5").touch()
    (tmp_path / "some.file").touch()
    mark(tmp_path / "bad name" / "step_1")
    (tmp_path / "step_6" / ".complete").mkdir(parents=True)
    found = look(tmp_path)
    assert found.marked == []
    assert list(found.unmarked) == [tmp_path / "step_6"]


def test_patterns_with_folders(tmp_path: Path) -> None:
    config = {"pattern": "global_step_{step}/actor/huggingface", "marker": "STABLE"}
    done = mark(tmp_path / "global_step_4" / "actor" / "huggingface", "STABLE")
    (tmp_path / "global_step_5").mkdir()
    mark(tmp_path / "r" / "global_step_0006" / "actor" / "huggingface", "STABLE")
    found = look(tmp_path, **config)
    assert [(one.directory, one.folder_run, one.step) for one in found.marked] == [
        (done, None, 4),
        (tmp_path / "r" / "global_step_0006" / "actor" / "huggingface", "r", 6),
    ]
    # still to be made, and known already
    assert found.unmarked == {
        tmp_path / "global_step_5" / "actor" / "huggingface": Unfinished(5, None)
    }


def test_patterns_with_a_folder_in_front_and_a_repeated_step(tmp_path: Path) -> None:
    mark(tmp_path / "ckpt" / "step_4-4" / "hf_4")
    mark(tmp_path / "ckpt" / "step_4-5" / "hf_4")
    found = look(tmp_path, pattern="ckpt/step_{step}-{step}/hf_{step}")
    assert [one.step for one in found.marked] == [4]
    assert set(found.folders) == {tmp_path, tmp_path / "ckpt"}
    shutil.rmtree(tmp_path / "ckpt")
    (tmp_path / "ckpt").touch()
    assert look(tmp_path, pattern="ckpt/step_{step}").marked == []


def test_words_of_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    for number, name in enumerate(
        ["step_41.skip", "run.end", "base.request", "r/step_3.skip", "r/run.end", ".x.request"]
    ):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (number, number))
    (tmp_path / "dir.request").mkdir()
    found = look(tmp_path)
    assert [(file.kind, file.step, file.folder_run) for file in found.files] == [
        ("skip", 41, None),
        ("run_end", None, None),
        ("request", None, None),
        ("skip", 3, "r"),
        ("run_end", None, "r"),
    ]


def test_a_skip_of_a_pattern_with_folders_lies_flat(tmp_path: Path) -> None:
    (tmp_path / "global_step_7--actor--huggingface.skip").touch()
    found = look(tmp_path, pattern="global_step_{step}/actor/huggingface")
    assert [file.step for file in found.files] == [7]


def test_a_missing_root_has_no_folders(tmp_path: Path) -> None:
    assert look(tmp_path / "root").folders == {}
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        look(tmp_path / "file")


def test_links_on_the_way_are_seen(tmp_path: Path) -> None:
    mark(tmp_path / "elsewhere" / "step_2")
    root = tmp_path / "root"
    mark(root / "step_1")
    (root / "step_2").symlink_to(tmp_path / "elsewhere" / "step_2")
    (root / "r").symlink_to(tmp_path / "elsewhere")
    layout = Layout(staging(root))
    linked = {
        str(f.directory.relative_to(root)): layout.is_linked(f.directory)
        for f in scan(layout).marked
    }
    assert linked == {"step_1": False, "step_2": True, "r/step_2": True}


def test_files_that_vanish_between_listing_and_stat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.request").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    assert look(tmp_path).files == []
    mark(tmp_path / "r" / "step_1")

    class Gone(scan_module._Look):
        def folder(self, folder: Path, run: str | None) -> None:
            if run is not None:
                shutil.rmtree(folder)
            super().folder(folder, run)

    monkeypatch.setattr(scan_module, "_Look", Gone)
    assert look(tmp_path).marked == []


def test_a_directory_that_may_not_be_entered() -> None:
    with open_folder() as folder:
        mark(folder / "step_1").chmod(0)
        (folder / "closed").mkdir(mode=0)
        mark(folder / "listed" / "step_2").parent.chmod(0o644)
        (folder / "lost+found").mkdir(mode=0)
        printed = as_other_user(
            """
found = scan.scan(scan.Layout(Staging(root=sys.argv[1])))
print(found.marked, list(found.unmarked), [path.name for path in found.closed])
print(sorted(path.name for path in found.closed_folders))
""",
            folder,
        )
        (folder / "listed").chmod(0o755)
    assert printed == "[] [] ['step_1']\n['closed', 'listed']"


def test_a_closed_folder_on_the_way_to_a_step_is_noted() -> None:
    with open_folder() as folder:
        mark(folder / "out" / "step_1").parent.chmod(0)
        (folder / "out_of_it").touch()
        printed = as_other_user(
            """
found = scan.scan(scan.Layout(Staging(root=sys.argv[1], pattern="out/step_{step}")))
print(found.marked, [path.name for path in found.closed_folders])
""",
            folder,
        )
    assert printed == "[] ['out']"


@FUZZ
@given(st.text("step_{}/0a.", max_size=20), st.integers(0, 10**15 - 1))
def test_the_step_that_a_pattern_writes_is_read_back(text: str, step: int) -> None:
    pattern = "x" + text.replace("{", "").replace("}", "").replace("/.", "/") + "-{step}"
    layout = Layout(staging(Path("/root"), pattern=pattern))
    name = pattern.replace("{step}", str(step)).split("/")[-1]
    match = layout.heads[-1].fullmatch(name)
    assert match is not None
    assert int(match["step"]) == step


def test_a_link_that_cannot_be_followed_hides_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "step_1").symlink_to("x" * 300)
    (tmp_path / "run").symlink_to("x" * 300)
    mark(tmp_path / "step_2")
    assert [one.step for one in look(tmp_path).marked] == [2]


def test_a_link_to_a_closed_place_hides_nothing_else() -> None:
    with open_folder() as folder:
        (folder / "closed" / "x").mkdir(parents=True)
        (folder / "closed").chmod(0)
        (folder / "root").mkdir()
        (folder / "root" / "step_1").symlink_to(folder / "closed" / "x")
        mark(folder / "root" / "step_2")
        printed = as_other_user(
            """
found = scan.scan(scan.Layout(Staging(root=sys.argv[1])))
print([one.step for one in found.marked])
""",
            folder / "root",
        )
    assert printed == "[2]"
