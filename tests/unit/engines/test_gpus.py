from __future__ import annotations

from pathlib import Path

import pytest

from evald.engines import gpus
from evald.engines.gpus import (
    GpuProblem,
    GpuProcess,
    claim_gpus,
    device_list,
    foreign_sentences,
    gpu_processes,
    known_gpus,
    parse_gpus,
    parse_processes,
    visible_gpus,
)

# as printed on a node with two GPUs
GPUS = """\
0, GPU-a58efc59-57ac-fb61-0a4c-1005030eb294
1, GPU-ef39a5bb-7eb1-d172-3a3f-79ec410100fb
"""
PROCESSES = "GPU-ef39a5bb-7eb1-d172-3a3f-79ec410100fb, 564, 1634 MiB, python3\n"
FIRST, SECOND = (
    "GPU-a58efc59-57ac-fb61-0a4c-1005030eb294",
    "GPU-ef39a5bb-7eb1-d172-3a3f-79ec410100fb",
)
KNOWN = {"0": FIRST, "1": SECOND}
PROCESS = GpuProcess(gpu=SECOND, pid="564", memory="1634 MiB", name="python3")


def test_what_nvidia_smi_prints() -> None:
    assert parse_gpus(GPUS) == KNOWN
    assert parse_gpus("No devices were found\n") == {}
    assert parse_processes(PROCESSES) == [PROCESS]
    assert parse_processes("") == []
    # a command line with commas, in a container that sees no memory
    (odd,) = parse_processes(f"\n{FIRST}, 7, [N/A], /bin/x --a=1,2\nNot supported\n")
    assert (odd.memory, odd.name) == ("[N/A]", "/bin/x --a=1,2")


@pytest.mark.parametrize(
    ("visible", "known", "seen"),
    [
        (None, KNOWN, [FIRST, SECOND]),
        (None, {}, None),
        ("1,0", KNOWN, [SECOND, FIRST]),
        (" 1 ", KNOWN, [SECOND]),
        ("GPU-ef39,GPU-a58efc59-57ac-fb61-0a4c-1005030eb294", KNOWN, [SECOND, FIRST]),
        ("MIG-1234,0", KNOWN, ["MIG-1234", FIRST]),
        ("", KNOWN, []),
        # an entry that is none ends the list, as in CUDA
        ("0,-1,1", KNOWN, [FIRST]),
        ("0,7,1", KNOWN, [FIRST]),
        ("GPU-", KNOWN, []),
        # without nvidia-smi every entry is believed
        ("3,GPU-x", {}, ["3", "GPU-x"]),
    ],
)
def test_the_gpus_that_evald_may_use(
    visible: str | None, known: dict[str, str], seen: list[str] | None
) -> None:
    assert visible_gpus(visible, known) == seen


def test_engines_get_numbers() -> None:
    assert device_list([SECOND, FIRST], KNOWN) == "1,0"
    assert device_list(["MIG-1234"], KNOWN) == "MIG-1234"
    assert device_list(["3", "GPU-x"], {}) == "3,GPU-x"
    with pytest.raises(GpuProblem, match="cannot use GPU GPU-gone: nvidia-smi does not list it"):
        device_list(["GPU-gone"], KNOWN)


def test_who_sits_on_a_gpu() -> None:
    mps = GpuProcess(gpu=FIRST, pid="1", memory="28 MiB", name="nvidia-cuda-mps-server")
    processes = [mps, PROCESS]
    assert foreign_sentences([FIRST], processes, KNOWN) == []
    (sentence,) = foreign_sentences([FIRST, SECOND], processes, KNOWN)
    assert sentence == (
        f"GPU 1 ({SECOND}) is in use by python3 (pid 564, 1634 MiB); end that, or leave the GPU "
        "out of CUDA_VISIBLE_DEVICES"
    )
    assert foreign_sentences(["1"], processes, KNOWN) == [sentence]
    assert foreign_sentences([SECOND], processes, {})[0].startswith(f"GPU {SECOND} is in use")


class Smi:
    """A program named nvidia-smi, alone on PATH."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "nvidia-smi"

    def does(self, script: str) -> None:
        self.path.write_text(f"#!/bin/sh\n{script}\n")
        self.path.chmod(0o755)

    def shows(self, processes: str) -> None:
        listing = f"printf '%s' '{GPUS}'", f"printf '%s' '{processes}'"
        self.does(f'case "$1" in --query-gpu=*) {listing[0]};; *) {listing[1]};; esac')


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    monkeypatch.setenv("PATH", str(tmp_path))
    return Smi(tmp_path)


def test_a_node_without_nvidia_smi(smi: Smi) -> None:
    assert not smi.path.exists()
    assert known_gpus() == {}
    assert gpu_processes() == []
    assert claim_gpus(["0", "1"]) == "0,1"


def test_a_gpu_is_claimed_only_when_nobody_is_on_it(smi: Smi) -> None:
    smi.shows("")
    assert known_gpus() == KNOWN
    assert claim_gpus([FIRST, SECOND]) == "0,1"
    smi.shows(PROCESSES)
    assert gpu_processes() == [PROCESS]
    assert claim_gpus([FIRST]) == "0"
    with pytest.raises(GpuProblem, match=r"GPU 1 .* is in use by python3 \(pid 564, 1634 MiB\)"):
        claim_gpus([SECOND])


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (
            "echo 'NVIDIA-SMI has failed because of the driver.'; exit 9",
            "failed because of the dri",
        ),
        ("exit 3", "exit code 3"),
        ("exec /bin/sleep 30", "no answer within 0.2 s; the driver seems to hang"),
    ],
)
def test_an_nvidia_smi_that_fails(
    smi: Smi, monkeypatch: pytest.MonkeyPatch, script: str, problem: str
) -> None:
    monkeypatch.setattr(gpus, "TIMEOUT_S", 0.2)
    smi.does(script)
    with pytest.raises(GpuProblem, match=problem):
        known_gpus()


def test_an_nvidia_smi_that_is_no_program(smi: Smi) -> None:
    smi.does("exit 0")
    smi.path.chmod(0o644)
    with pytest.raises(GpuProblem, match="cannot run nvidia-smi: Permission denied"):
        known_gpus()
