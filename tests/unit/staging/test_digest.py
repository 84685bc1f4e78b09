import io
import os
import threading
from pathlib import Path

import pytest
import xxhash
from staging_cases import MARKER, as_other_user, open_folder, snapshot

from evald.errors import InvalidSnapshot, SnapshotGone
from evald.staging import digest as digest_module
from evald.staging.digest import HashingStopped, content_digest, fingerprint
from evald.staging.files import list_files, open_file
from evald.staging.manifest import ManifestFile


def fp(directory: Path) -> str:
    return fingerprint(directory, MARKER)[0]


def digest(directory: Path) -> str:
    return content_digest(directory, MARKER)


def test_a_fingerprint_sees_every_change(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s")
    weights = directory / "model.safetensors"
    seen = [fp(directory)]
    assert fp(directory) == seen[0]
    os.utime(weights, ns=(1, 1))
    seen.append(fp(directory))
    weights.write_bytes(weights.read_bytes()[:-1])
    os.utime(weights, ns=(1, 1))
    seen.append(fp(directory))
    weights.rename(directory / "other")
    seen.append(fp(directory))
    (directory / MARKER).unlink()
    seen.append(fp(directory))
    (directory / "adapter").mkdir()
    (directory / "adapter" / "a").touch()
    seen.append(fp(directory))
    assert len(set(seen)) == 6


def test_a_renamed_directory_keeps_its_fingerprint(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s")
    before = fingerprint(directory, MARKER)
    assert fingerprint(directory.rename(tmp_path / "t"), MARKER) == before
    (tmp_path / "u").symlink_to("t")
    assert fingerprint(tmp_path / "u", MARKER) != before


def test_the_size_is_that_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".b").write_bytes(b"45")
    (tmp_path / "link").symlink_to("a")
    assert fingerprint(tmp_path, MARKER)[1] == 8


def test_a_marker_beside_the_directory_counts(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    directory.mkdir()
    before = fingerprint(directory, "../done")
    (tmp_path / "done").write_text("{}")
    after = fingerprint(directory, "../done")
    assert before[0] != after[0]
    assert after[1] == 2


def test_what_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fp(tmp_path / "s")
    (tmp_path / "s").touch()
    with pytest.raises(FileNotFoundError):
        fp(tmp_path / "s")


def test_a_failing_file_system_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "scandir", stale)
    with pytest.raises(SnapshotGone, match="Stale file handle"):
        fp(tmp_path)


def test_a_digest_is_of_names_and_content_alone(tmp_path: Path) -> None:
    one = snapshot(tmp_path / "one", manifest={"export_s": 1})
    two = snapshot(tmp_path / "two")
    assert digest(one) == digest(two)
    (two / ".nfs0001").touch()
    assert digest(one) == digest(two)
    (two / "config.json").rename(two / "config2.json")
    assert digest(one) != digest(two)
    (two / "config2.json").rename(two / "config.json")
    (two / ".hidden").touch()
    assert digest(one) != digest(two)


def test_a_digest_is_what_its_definition_says(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"123")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"")
    (tmp_path / MARKER).touch()
    lines = [
        f"a/x\0{0}\0{xxhash.xxh3_64_hexdigest(b'')}\n",
        f"b\0{3}\0{xxhash.xxh3_64_hexdigest(b'123')}\n",
    ]
    assert digest(tmp_path) == xxhash.xxh3_128_hexdigest("".join(lines).encode())


def test_threads_and_chunks_give_the_same_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = snapshot(tmp_path / "s", shards=3)
    expected = digest(directory)
    monkeypatch.setattr(digest_module, "_SMALL_BYTES", 0)
    monkeypatch.setattr(digest_module, "_CHUNK_BYTES", 1000)
    assert digest(directory) == expected


def test_what_is_no_regular_file_counts_by_its_link(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    os.mkfifo(tmp_path / "s" / "pipe")
    (tmp_path / "s" / "up").symlink_to("..")
    before = digest(tmp_path / "s")
    (tmp_path / "s" / "up").unlink()
    (tmp_path / "s" / "up").symlink_to("../..")
    assert digest(tmp_path / "s") != before


def test_manifest_hashes_are_checked(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    good = xxhash.xxh3_64_hexdigest(b"123").upper()
    expected = {
        "a": ManifestFile(xxh3=good),
        MARKER: ManifestFile(xxh3="0" * 16),
        "unhashed": ManifestFile(),
    }
    assert content_digest(tmp_path, MARKER, expected=expected) == digest(tmp_path)
    with pytest.raises(InvalidSnapshot, match=r"a has hash .* and the manifest says 0000"):
        content_digest(tmp_path, MARKER, expected={"a": ManifestFile(xxh3="0" * 16)})
    with pytest.raises(InvalidSnapshot, match="the manifest names b, which is missing"):
        content_digest(tmp_path, MARKER, expected={"b": ManifestFile(xxh3="0" * 16)})


def test_what_a_trainer_resumes_from_is_read_only_if_the_manifest_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"123")
    alone = digest(tmp_path)
    for name in ("optimizer.pt", "scheduler.pt"):
        (tmp_path / name).write_bytes(b"1")
    assert fingerprint(tmp_path, MARKER)[1] == 5
    right = {"scheduler.pt": ManifestFile(xxh3=xxhash.xxh3_64_hexdigest(b"1"))}
    assert content_digest(tmp_path, MARKER, expected=right) == alone
    with pytest.raises(InvalidSnapshot, match=r"scheduler.pt has hash"):
        content_digest(tmp_path, MARKER, expected={"scheduler.pt": ManifestFile(xxh3="0" * 16)})
    read: list[str] = []

    def opened(path: Path) -> io.BufferedReader:
        read.append(path.name)
        return open_file(path)

    monkeypatch.setattr(digest_module, "open_file", opened)
    assert digest(tmp_path) == alone
    assert read == ["a"]


def test_hashing_can_be_stopped(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    stop = threading.Event()
    stop.set()
    with pytest.raises(HashingStopped):
        content_digest(tmp_path, MARKER, stop=stop)


def test_a_file_that_vanishes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"123")
    found = list_files(tmp_path)
    (tmp_path / "a").unlink()
    monkeypatch.setattr(digest_module, "list_files", lambda _: found)
    with pytest.raises(FileNotFoundError):
        digest(tmp_path)


def test_an_unreadable_file_is_told() -> None:
    with open_folder() as folder:
        (folder / "weights").write_bytes(b"1")
        (folder / "weights").chmod(0)
        (folder / "closed").mkdir(mode=0)
        sentence = as_other_user(
            """
try:
    digest.content_digest(Path(sys.argv[1]), ".complete")
except InvalidSnapshot as error:
    print(error.detail)
assert len(digest.fingerprint(Path(sys.argv[1]), ".complete")[0]) == 32
assert len(digest.fingerprint(Path(sys.argv[1]) / "closed", ".complete")[0]) == 32
print([file.name for file in files.list_files(Path(sys.argv[1]) / "closed")])
""",
            folder,
        )
    assert "cannot read weights: its mode is 0000" in sentence
    assert sentence.endswith("['.']")
