"""What a push makes of a directory and of a destination, before a byte moves."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from evald.config import Staging
from evald.errors import EvaldError
from evald.staging.manifest import parse_manifest
from evald.staging.scan import Layout, scan
from evald.trainer.contract import PushError
from evald.trainer.publish import publish
from evald.trainer.push import plan as push_plan
from evald.trainer.push.carrier import _far_end, carrier_for
from evald.trainer.push.choice import fits, is_needed
from evald.trainer.push.copy import CopyFar
from evald.trainer.push.manifest import SourceFile
from evald.trainer.push.plan import by_name, check_name, is_attempt, pack, share_out


def far(destination: str) -> str:
    return str(_far_end(destination, streams=2, ssh=("ssh",), max_bytes_s=None))


@pytest.mark.parametrize(
    ("destination", "shown"),
    [
        ("host:/dev/shm/evald", "host:/dev/shm/evald"),
        ("me@host.name:/a b/", "me@host.name:/a b"),
        ("me@[::1]:/r", "me@::1:/r"),
        ("[fe80::1%eth0]:/r", "fe80::1%eth0:/r"),
        ("h:/", "h:/"),
        ("/mnt/shared/evald", "/mnt/shared/evald"),
        ("/mnt/a:b", "/mnt/a:b"),
    ],
)
def test_destinations(destination: str, shown: str) -> None:
    assert far(destination) == shown


def test_a_relative_path_is_made_absolute() -> None:
    end = _far_end("shared/evald", streams=2, ssh=("ssh",), max_bytes_s=None)
    assert isinstance(end, CopyFar)
    assert str(end) == str(Path("shared/evald").absolute())


@pytest.mark.parametrize(
    "destination",
    [
        "",
        "host:",
        "host:relative",
        "host::module",
        "rsync://host/module",
        "ssh://host/path",
        "-oProxyCommand=x:/r",
        "a b:/r",
        "me@you@host:/r",
        "::1:/r",
        "h:/r\0",
        "/r\0",
    ],
)
def test_what_is_no_destination(destination: str) -> None:
    with pytest.raises(ValueError, match=r"cannot push to .*write host:/path, user@host:/path, or"):
        far(destination)


def test_numbers_and_names_that_cannot_be(tmp_path: Path) -> None:
    for wrong in ({"streams": 0}, {"timeout_s": 0.0}, {"timeout_s": math.nan}):
        with pytest.raises(ValueError, match="both must be numbers above 0"):
            carrier_for("/r", root=tmp_path, **wrong)
    for marker in ("../done", "/done"):
        with pytest.raises(ValueError, match="it must lie inside the snapshot"):
            carrier_for("/r", root=tmp_path, marker=marker)
    with pytest.raises(ValueError, match="max_bytes_s is for rsync"):
        carrier_for("/r", root=tmp_path, max_bytes_s=1)
    with pytest.raises(ValueError, match="cannot push 0 bytes a second: give a number above 0"):
        carrier_for("h:/r", root=tmp_path, max_bytes_s=0)
    with pytest.raises(ValueError, match="the words of ssh are empty"):
        carrier_for("h:/r", root=tmp_path, ssh=())
    with pytest.raises(ValueError, match="there is no home of ~nosuchuser on this machine"):
        carrier_for("~nosuchuser/x", root=tmp_path)
    with pytest.raises(EvaldError, match="there is no no-such-ssh on this machine; install it"):
        carrier_for("h:/r", root=tmp_path, ssh=("no-such-ssh",))
    carrier = carrier_for("/r", root=tmp_path)
    with pytest.raises(ValueError, match="it lies outside"):
        carrier.carry(tmp_path.parent / "step_1")
    for name in ("", "/a", "../a", "a/../b", ".hidden", "a/.b", "-a"):
        with pytest.raises(ValueError, match="cannot push as"):
            check_name(name)
    assert check_name("run//step_40/") == "run/step_40"


def write(directory: Path, **files: bytes) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return directory


def file_a(content: bytes) -> Callable[[Path], None]:
    def build(directory: Path) -> None:
        write(directory, a=content)

    return build


def test_a_directory_is_packed_with_its_marker_apart(tmp_path: Path) -> None:
    blobs = write(tmp_path / "blobs", weights=b"12345")
    step = write(tmp_path / "step_40", config=b"{}", sub__part=b"abc")
    (step / "linked").symlink_to(blobs / "weights")
    (step / "folder").symlink_to(blobs)
    (step / ".nfs0001").touch()
    (step / "STABLE").write_text("")
    parcel = pack(step, "run/step_40", marker="STABLE")
    assert {file.name: file.size_bytes for file in parcel.files} == {
        "config": 2,
        "folder/weights": 5,
        "linked": 5,
        "sub/part": 3,
    }
    assert (parcel.content, parcel.size_bytes, parcel.step) == (b"", 15, 40)
    assert parcel.temporary.startswith(".push-run--step_40.")


def test_the_manifest_says_more(tmp_path: Path) -> None:
    step = publish(file_a(b"1"), tmp_path, 7, run="r")
    parcel = pack(step, "x_1", marker=".complete")
    assert (parcel.said.run, parcel.step) == ("r", 7)
    assert parcel.said.files["a"].xxh3 == xxhash.xxh3_64_hexdigest(b"1")
    assert parcel.content == (step / ".complete").read_bytes()
    (step / ".complete").write_text("{half")
    assert pack(step, "x_1", marker=".complete").said.files == {}


def test_the_hidden_name_is_of_the_bytes(tmp_path: Path) -> None:
    def published(root: str, content: bytes) -> str:
        step = publish(file_a(content), tmp_path / root, 7)
        return pack(step, "step_7", marker=".complete").temporary

    assert published("one", b"1") == published("two", b"1") != published("three", b"2")
    # without hashes, the time of writing tells one export from the next
    step = write(tmp_path / "step_1", a=b"1", done=b"")
    first = pack(step, "step_1", marker="done").temporary
    assert pack(step, "step_1", marker="done").temporary == first
    os.utime(step / "a", ns=(1, 1))
    assert pack(step, "step_1", marker="done").temporary != first
    assert is_attempt(first, "step_1")
    assert is_attempt(first + ".old", "step_1")
    for hidden in (".push-step_1.x", ".push-step_1.5." + first[-16:], ".tmp-step_1." + first[-16:]):
        assert not is_attempt(hidden, "step_1")


def test_evald_does_not_look_at_hidden_names(tmp_path: Path) -> None:
    step = write(tmp_path / "step_1", a=b"1")
    (step / ".complete").touch()
    step.rename(tmp_path / pack(step, "step_1", marker=".complete").temporary)
    found = scan(Layout(Staging(root=str(tmp_path))))
    assert (found.marked, found.unmarked, found.misnamed) == ([], {}, [])


def test_what_cannot_be_packed_is_one_sentence(tmp_path: Path) -> None:
    step = write(tmp_path / "step_1", a=b"1")
    with pytest.raises(PushError, match=r"it has no marker \.complete, so it is not finished"):
        pack(step, "step_1", marker=".complete")
    with pytest.raises(PushError, match="has no marker"):
        pack(tmp_path / "none", "step_1", marker=".complete")
    with pytest.raises(PushError, match="there is no file in it"):
        pack(write(tmp_path / "empty"), "step_1", marker="m", unmarked=True)
    (step / "dangling").symlink_to("nowhere")
    with pytest.raises(PushError, match="dangling is not there"):
        pack(step, "step_1", marker="m", unmarked=True)
    (step / "dangling").unlink()
    os.mkfifo(step / "pipe")
    with pytest.raises(PushError, match="neither a file nor a folder; remove it"):
        pack(step, "step_1", marker="m", unmarked=True)
    (step / "pipe").unlink()
    (step / "loop").symlink_to(".")
    with pytest.raises(PushError, match=r"more than 32 folders|Too many levels"):
        pack(step, "step_1", marker="m", unmarked=True)


def test_a_manifest_is_made_for_what_has_none(tmp_path: Path) -> None:
    step = write(tmp_path / "step_1", a=b"1", sub__b=b"")
    content = pack(step, "step_1", marker=".complete", unmarked=True).content
    manifest = parse_manifest(content, name=".complete", step=40)
    assert manifest.is_hashed
    assert json.loads(content)["files"] == {
        "a": {"size": 1, "xxh3": xxhash.xxh3_64_hexdigest(b"1")},
        "sub/b": {"size": 0, "xxh3": xxhash.xxh3_64_hexdigest(b"")},
    }


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("tokenizer.model", True),
        ("chat_template.jinja", True),
        ("additional_chat_templates/tool_use.jinja", True),
        ("adapter/adapter_model.bin", True),
        ("modeling_own.py", True),
        ("optimizer.pt", False),
        ("rng_state_0.pth", False),
        ("scheduler.pt", False),
        ("trainer_state.json", False),
        ("training_args.bin", False),
        ("global_step40/mp_rank_00_model_states.pt", False),
        ("optimizer.safetensors", False),
    ],
)
def test_what_an_evaluation_needs(name: str, *, needed: bool) -> None:
    assert is_needed(name) is needed


def test_what_is_left_out_is_not_in_the_manifest_either(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        (directory / "optimizer.pt").write_bytes(b"12345")

    step = publish(build, tmp_path, 7, run="r", final=True)
    parcel = pack(step, "step_7", marker=".complete", everything=False)
    assert [file.name for file in parcel.files] == ["config.json"]
    assert [file.name for file in parcel.left_out] == ["optimizer.pt"]
    manifest = parse_manifest(parcel.content, name=".complete", step=7)
    assert (manifest.run, manifest.final, list(manifest.files)) == ("r", True, ["config.json"])
    (step / "config.json").unlink()
    (step / ".complete").write_text("no manifest")
    with pytest.raises(PushError, match="no weights, config or tokenizer file in it; --all sends"):
        pack(step, "step_7", marker=".complete", everything=False)


@pytest.mark.parametrize(
    ("name", "pattern", "is_found"),
    [
        ("step_40", "step_{step}", True),
        ("run/step_40", "step_{step}", True),
        ("a/run/step_40", "step_{step}", False),
        ("step_40x", "step_{step}", False),
        ("checkpoint-40", "step_{step}", False),
        ("global_step_4/actor/huggingface", "global_step_{step}/actor/huggingface", True),
        ("s1/1", "s{step}/{step}", True),
        ("s1/2", "s{step}/{step}", False),
    ],
)
def test_names_that_the_node_finds(name: str, pattern: str, *, is_found: bool) -> None:
    assert fits(name, pattern) is is_found


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda step: (step / "a").unlink(), "its manifest does not fit, a is missing; export"),
        (lambda step: (step / "a").write_bytes(b"123"), "a has 3 bytes instead of 1"),
        (lambda step: (step / "a").write_bytes(b"2"), "a has other bytes"),
    ],
)
def test_a_source_that_is_not_as_its_manifest_says(
    tmp_path: Path, change: Callable[[Path], object], sentence: str
) -> None:
    step = publish(file_a(b"1"), tmp_path, 7)
    write(step, b=b"")
    change(step)
    with pytest.raises(PushError, match=sentence):
        pack(step, "step_7", marker=".complete")


def test_streams_have_about_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def sized(*sizes: int) -> list[SourceFile]:
        return [SourceFile(f"f{i}", Path("f"), size, 0) for i, size in enumerate(sizes)]

    files = sized(1, 5, 2, 9, 4, 4)
    assert len(share_out(files, 3)) == 1  # little is not worth more connections
    monkeypatch.setattr(push_plan, "MIN_SHARE_BYTES", 1)
    shares = share_out(files, 3)
    assert sorted(sum(file.size_bytes for file in share) for share in shares) == [8, 8, 9]
    assert {file.name for share in shares for file in share} == {file.name for file in files}
    assert all(share[0].size_bytes == max(f.size_bytes for f in share) for share in shares)
    assert len(share_out(sized(1, 1), 8)) == 2
    assert [len(share) for share in share_out(sized(0, 0, 0, 0), 2)] == [4]


def test_a_strange_name_means_all_files() -> None:
    files = [SourceFile(name, Path(name), 1, 0) for name in "ab"]
    assert by_name(files, {"a"}) == files[:1]
    assert by_name(files, {"a", "?"}) == files
