"""What other frameworks write is found when it is whole, and not a write sooner."""

from __future__ import annotations

import json
import shutil
import typing
from pathlib import Path
from typing import Any

import pytest
from preset_trees import SAVES, SHARDS, age, save
from staging_cases import base_model, refusal, staging

from evald.config import Staging
from evald.config_load import build_config
from evald.config_resolve import lay_over_preset
from evald.errors import ConfigError
from evald.presets import PRESETS
from evald.staging import completeness as completeness_module
from evald.staging.candidate import check_snapshot
from evald.staging.digest import content_digest, fingerprint
from evald.staging.scan import Found, FoundSnapshot, Layout, scan
from evald.staging.validate import validate
from evald.testing import write_safetensors

PRESET_NAMES = sorted(PRESETS)


def config(preset: str, root: Path, **settings: Any) -> Staging:
    return staging(root, preset=preset, **{**PRESETS[preset].settings, **settings})


def look(preset: str, root: Path, **settings: Any) -> Found:
    return scan(Layout(config(preset, root, **settings)))


def found(preset: str, root: Path) -> FoundSnapshot | None:
    marked = look(preset, root).marked
    assert len(marked) <= 1, marked
    return marked[0] if marked else None


def weights_in(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.rglob("*.safetensors")}


# --- every framework ---------------------------------------------------------------------------


def test_the_config_knows_every_preset() -> None:
    (named, _) = typing.get_args(typing.get_type_hints(Staging)["preset"])
    assert set(typing.get_args(named)) == set(PRESETS) == set(SAVES)


@pytest.mark.parametrize("preset", PRESET_NAMES)
@pytest.mark.parametrize("folder", ["", "a-run"])
def test_it_is_found_with_the_last_write(tmp_path: Path, preset: str, folder: str) -> None:
    root = tmp_path / folder
    root.mkdir(exist_ok=True)
    writes = SAVES[preset](root, 40, 0)
    for number, write in enumerate(writes):
        assert found(preset, tmp_path) is None, f"after {number} of {len(writes)} writes"
        write()
    one = found(preset, tmp_path)
    assert one is not None
    assert (one.step, one.folder_run) == (40, folder or None)
    assert one.directory.relative_to(root) == Path(PRESETS[preset].pattern.format(step=40))
    validate(one.directory, base_model(), owned=False)
    assert found(preset, tmp_path) == one  # looking changes nothing


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_an_overwritten_one_is_never_half_old(tmp_path: Path, preset: str) -> None:
    save(preset, tmp_path, 40)
    age(tmp_path)
    old, old_weights = found(preset, tmp_path), weights_in(tmp_path)
    assert old is not None
    writes = SAVES[preset](tmp_path, 40, 1)
    for number, write in enumerate(writes):
        if found(preset, tmp_path) is not None:
            assert weights_in(tmp_path) == old_weights, f"after {number} writes"
        write()
    new = found(preset, tmp_path)
    assert new is not None
    assert new.identity != old.identity
    assert set(weights_in(tmp_path).values()).isdisjoint(old_weights.values())


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_a_save_leaves_the_others_as_they_are(tmp_path: Path, preset: str) -> None:
    save(preset, tmp_path, 40)
    before = found(preset, tmp_path)
    save(preset, tmp_path, 41, seed=1)
    after = look(preset, tmp_path).marked
    assert [one.step for one in after] == [40, 41]
    assert after[0] == before


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_a_file_is_read_once_for_each_of_its_states(
    tmp_path: Path, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(preset, tmp_path, 40)
    assert found(preset, tmp_path) is not None

    def opened(path: Path) -> None:
        raise AssertionError(f"opened {path}")

    monkeypatch.setattr(completeness_module, "open_file", opened)
    assert found(preset, tmp_path) is not None


# --- transformers' Trainer -----------------------------------------------------------------------


def test_a_trainer_state_of_another_step_proves_nothing(tmp_path: Path) -> None:
    save("hf-trainer", tmp_path, 40)
    (tmp_path / "checkpoint-40").rename(tmp_path / "checkpoint-50")
    assert found("hf-trainer", tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "4", '{"global_step": "40"}', "\xff"])
def test_a_trainer_state_that_is_none(tmp_path: Path, text: str) -> None:
    save("hf-trainer", tmp_path, 40)
    (tmp_path / "checkpoint-40" / "trainer_state.json").write_text(text)
    assert found("hf-trainer", tmp_path) is None


def test_what_other_ranks_write_later_changes_nothing(tmp_path: Path) -> None:
    save("hf-trainer", tmp_path, 40)
    directory = tmp_path / "checkpoint-40"
    marker = PRESETS["hf-trainer"].marker
    one = found("hf-trainer", tmp_path)
    before = fingerprint(directory, marker)[0], content_digest(directory, marker)
    age(tmp_path)
    before = fingerprint(directory, marker)[0], content_digest(directory, marker)
    (directory / "rng_state_1.pth").write_bytes(b"late")
    (directory / "global_step40").mkdir()
    (directory / "global_step40" / "zero_pp_rank_1_optim_states.pt").write_bytes(b"late")
    assert (fingerprint(directory, marker)[0], content_digest(directory, marker)) == before
    assert one is not None
    (directory / SHARDS[0]).touch()
    assert fingerprint(directory, marker)[0] != before[0]


def test_overwriting_is_told_as_a_doubt(tmp_path: Path) -> None:
    save("hf-trainer", tmp_path, 40)
    age(tmp_path)
    directory = tmp_path / "checkpoint-40"
    (directory / SHARDS[1]).touch()
    seen = look("hf-trainer", tmp_path)
    assert list(seen.unmarked) == [directory]
    assert seen.doubtful[directory].startswith(
        f"cannot take snapshot {directory}: {SHARDS[1]} is newer than trainer_state.json"
    )


@pytest.mark.parametrize("preset", ["slime", "hf-trainer", "verl"])
def test_a_file_that_cannot_be_read_is_told(
    tmp_path: Path, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(preset, tmp_path, 40)

    def closed(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(completeness_module, "open_file", closed)
        (doubt,) = look(preset, tmp_path).doubtful.values()
    marker = PRESETS[preset].marker
    assert f"{marker}: Permission denied; the trainer must write it with mode 0644" in doubt
    assert found(preset, tmp_path) is not None  # it was not remembered


def test_a_state_is_not_taken_for_a_manifest(tmp_path: Path) -> None:
    save("hf-trainer", tmp_path, 40)
    one = config("hf-trainer", tmp_path)
    assert check_snapshot(one, tmp_path / "checkpoint-40", base_model()) is None


def test_an_adapter_alone_is_refused(tmp_path: Path) -> None:
    save("hf-trainer", tmp_path, 40)
    directory = tmp_path / "checkpoint-40"
    for path in directory.glob("model*"):
        path.unlink()
    write_safetensors(directory / "adapter_model.safetensors", {})
    sentence = refusal(lambda: validate(directory, base_model(), owned=False))
    assert sentence is not None
    assert "it is a LoRA adapter (adapter_model.safetensors) without the model's own" in sentence


def test_the_last_state_in_a_runs_folder_is_no_misnamed_snapshot(tmp_path: Path) -> None:
    save("hf-trainer", tmp_path / "a-run", 40)
    (tmp_path / "a-run" / "trainer_state.json").write_text("{}")
    seen = look("hf-trainer", tmp_path)
    assert seen.misnamed == []
    assert [one.step for one in seen.marked] == [40]


# --- verl ----------------------------------------------------------------------------------------


def test_verl_after_a_resume_from_an_earlier_step(tmp_path: Path) -> None:
    for step in (10, 20):
        save("verl", tmp_path, step)
    age(tmp_path)
    writes = SAVES["verl"](tmp_path, 15, 1)
    for write in writes:
        # the number in the file is still that of the abandoned 20
        assert 15 not in [one.step for one in look("verl", tmp_path).marked]
        write()
    # 20 comes back once it is written again
    assert [one.step for one in look("verl", tmp_path).marked] == [10, 15]
    save("verl", tmp_path, 20, seed=2)
    assert [one.step for one in look("verl", tmp_path).marked] == [10, 15, 20]


def test_verl_without_weights_is_told_how_to_save_them(tmp_path: Path) -> None:
    save("verl", tmp_path, 10)
    directory = tmp_path / "global_step_10" / "actor" / "huggingface"
    for path in directory.glob("model*"):
        path.unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").touch()
    assert found("verl", tmp_path) is not None
    remedy = PRESETS["verl"].weights
    sentence = refusal(lambda: validate(directory, None, without_weights=remedy))
    assert sentence is not None
    assert sentence.endswith(f"it is finished and has no weights (no *.safetensors file); {remedy}")


def test_weights_in_another_format_are_not_mistaken_for_training_state(tmp_path: Path) -> None:
    save("hf-trainer", tmp_path, 10)
    directory = tmp_path / "checkpoint-10"
    for path in directory.glob("model*"):
        path.unlink()
    (directory / "optimizer_0").mkdir()
    (directory / "optimizer_0" / "__0_0.distcp").touch()
    (directory / "pytorch_model_fsdp_0").mkdir()
    (directory / "pytorch_model_fsdp_0" / "__0_0.distcp").touch()
    sentence = refusal(lambda: validate(directory, None, without_weights="do so"))
    assert sentence is not None
    assert "in another format (pytorch_model_fsdp_0/__0_0.distcp)" in sentence
    assert sentence.endswith("do so")


def test_a_directory_that_goes_away_is_passed_over(tmp_path: Path) -> None:
    for preset in PRESET_NAMES:
        root = tmp_path / preset
        save(preset, root, 40)
        directory = root / PRESETS[preset].pattern.format(step=40)
        (directory / SHARDS[0]).unlink()
        (directory / SHARDS[0]).symlink_to("nowhere")
        look(preset, root)
        shutil.rmtree(directory)
        assert look(preset, root).marked == []


# --- in a config ---------------------------------------------------------------------------------


def resolved(preset: str, **settings: Any) -> Staging:
    raw: dict[str, Any] = {
        "staging": {"root": "/r", "preset": preset, **settings},
        "results": {"dir": "/results"},
        "blackbox": {"command": ["true", "{output}"]},
    }
    return build_config(raw, base=Path("/"), environ={}).staging


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_a_preset_stands_for_settings(preset: str) -> None:
    one = resolved(preset)
    told = {"pattern": one.pattern, "marker": one.marker, "owned": one.owned}
    assert told == PRESETS[preset].settings
    assert not one.owned


def test_what_is_set_beside_it_wins() -> None:
    one = resolved("miles", pattern="hf/rollout_{step}", marker="DONE", owned=True, keep=5)
    assert (one.pattern, one.marker, one.owned, one.keep) == ("hf/rollout_{step}", "DONE", True, 5)
    assert resolved("hf-trainer", pattern="out/checkpoint-{step}", owned=False).owned is False
    assert resolved("hf-trainer", marker="trainer_state.json").marker == "trainer_state.json"


@pytest.mark.parametrize(
    ("preset", "settings", "sentence"),
    [
        ("hf-trainer", {"marker": ".complete"}, "a snapshot is finished when trainer_state.json"),
        ("verl", {"marker": ".complete"}, "remove marker, or remove preset"),
        ("slime", {"marker": ".complete"}, "remove marker, or remove preset"),
        ("hf-trainer", {"owned": True}, "staging.owned: true, but with preset 'hf-trainer'"),
        ("verl", {"owned": True}, "deletes by itself; remove owned"),
        ("prime-rl", {"owned": True}, "deletes by itself; remove owned"),
        ("hf", {}, "must be one of 'miles', 'slime', 'prime-rl', 'hf-trainer', 'verl', got 'hf'"),
        (["verl"], {}, "staging.preset: must be one of"),
    ],
)
def test_contradictions_are_one_error(preset: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(preset, **settings)
    (problem,) = error.value.problems
    assert sentence in problem


def test_a_staging_table_that_is_none_is_left_to_the_loader() -> None:
    problems: list[str] = []
    assert lay_over_preset({"staging": 3}, problems) == {"staging": 3}
    assert problems == []


def test_the_table_can_be_read_as_plain_data() -> None:
    for preset in PRESETS.values():
        assert "{step}" in preset.pattern
        assert preset.marker in preset.finished.format(marker=preset.marker)
        json.dumps(preset.settings)
