from __future__ import annotations

import os
from pathlib import Path

import pytest

import evald
from evald.config_load import load_config
from evald.demo.layout import DemoError, Layout
from evald.demo.tasks import write_eval_sets


def layout_in(tmp_path: Path) -> Layout:
    return Layout(
        config=tmp_path / "demo.toml", directory=tmp_path / ".demo", root=tmp_path / "root"
    )


def test_checkouts_never_share_a_root() -> None:
    here = Layout.find({})
    there = Layout.find({"EVALD_DEMO_DIR": "/elsewhere/.demo"})
    assert here.config.name == "demo.toml"
    assert here.directory.name == ".demo"
    assert here.directory.parent == here.config.parents[1]
    assert here.root != there.root


def test_environment_decides_and_is_handed_on(tmp_path: Path) -> None:
    wanted = {"EVALD_DEMO_DIR": str(tmp_path / "d"), "EVALD_DEMO_ROOT": str(tmp_path / "r")}
    layout = Layout.find(wanted)
    assert (layout.directory, layout.root) == (tmp_path / "d", tmp_path / "r")
    assert layout.environment() == wanted


def test_without_a_checkout_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evald, "__file__", str(tmp_path / "evald" / "__init__.py"))
    with pytest.raises(DemoError, match=r"demo\.toml does not exist; clone the project"):
        Layout.find({})


def test_second_demo_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    layout = layout_in(tmp_path)
    with layout.locked():
        layout.prepare()
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(DemoError, match=f"another one .process {os.getpid()}. is using"):
            layout.locked().__enter__()
        assert sorted(tmp_path.rglob("*")) == before
    with layout.locked():
        pass


def test_fresh_start_removes_what_an_earlier_demo_left(tmp_path: Path) -> None:
    layout = layout_in(tmp_path)
    with layout.locked():
        layout.prepare()
        for directory in (layout.base, layout.data, layout.ledger.parent, layout.root):
            directory.mkdir(exist_ok=True)
            (directory / "old").write_text("old")
    with layout.locked():
        layout.prepare()
        assert not list(tmp_path.rglob("old"))
        layout.remove_models()
    assert not layout.root.exists()
    layout.remove_models()


@pytest.mark.parametrize("which", ["directory", "root"])
def test_files_of_somebody_else_are_never_deleted(tmp_path: Path, which: str) -> None:
    layout = layout_in(tmp_path)
    directory: Path = getattr(layout, which)
    directory.mkdir()
    (directory / "thesis").write_text("mine")
    with pytest.raises(DemoError, match="holds files that no demo of this checkout made"):
        layout.locked().__enter__()
    assert (directory / "thesis").read_text() == "mine"


def test_the_config_is_good_and_points_into_the_layout(tmp_path: Path) -> None:
    found = Layout.find({})
    layout = Layout(config=found.config, directory=tmp_path / "d", root=tmp_path / "r")
    config = load_config(layout.config, environ=layout.environment())
    assert config.results_file == layout.ledger
    assert config.staging.root == str(layout.root)
    assert config.staging.keep == 2
    assert config.fleet is not None
    assert config.fleet.model == str(layout.base)
    assert (config.fleet.device, config.engine_count) == ("cpu", 1)
    assert [Path(s.path) for s in config.eval] == write_eval_sets(layout.data, count=1)
    assert {s.grader for s in config.eval} == {"boxed_exact"}
    by_default = load_config(layout.config, environ={})
    assert by_default.staging.root == "/dev/shm/evald-demo"
    assert by_default.results_file == found.directory / "results" / "results.jsonl"
