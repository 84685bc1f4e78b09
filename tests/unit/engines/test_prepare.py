from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_sglang import small_sglang

from evald.config import Fleet, Group, Inherit
from evald.engines import inherit, prepare
from evald.engines.prepare import FleetPlan, explain_fleet, prepare_fleet
from evald.errors import ConfigError

GPU_LIST = "0, GPU-a\n1, GPU-b\n"
URL = "http://127.0.0.1:1"


class Node:
    """A node with programs of our own: an interpreter that has SGLang, and an nvidia-smi."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engines_dir = directory / "engines"
        self.environ = {"PATH": str(directory), "XDG_CACHE_HOME": str(directory / "cache")}
        identity = {"version": "0.5.23", "python": "3", "folders": [], "changed_ns": 1}
        known = small_sglang().arguments
        (directory / "identity").write_bytes(msgspec.json.encode(identity))
        (directory / "arguments").write_bytes(msgspec.json.encode(known))
        self.python = self.program("python", f'exec /bin/cat "{directory}/$4"')

    def program(self, name: str, script: str) -> str:
        path = self.directory / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    def has_gpus(self, processes: str = "") -> None:
        script = f"""case "$1" in
          --query-gpu=*) printf '%s' '{GPU_LIST}';;
          *) printf '%s' '{processes}';;
        esac"""
        self.program("nvidia-smi", script)

    def prepare(self, **fleet: Any) -> FleetPlan:
        return prepare_fleet(
            self.fleet(**fleet), engines_dir=self.engines_dir, environ=self.environ
        )

    def fleet(self, **fleet: Any) -> Fleet:
        return Fleet(**{"model": "/m", "engines": 1, "python": self.python, **fleet})


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setenv("PATH", str(tmp_path))
    return Node(tmp_path)


def test_a_fleet_without_engines_asks_nobody(node: Node) -> None:
    plan = node.prepare(engines=0, python="/nowhere/python", inherit=Inherit(url=URL))
    assert (plan.engines, plan.arguments, plan.notes) == ([], None, [])
    assert plan.context_len is None
    assert explain_fleet(node.fleet(engines=0), plan) == []


def test_the_environment_is_what_it_was_when_the_fleet_was_planned(node: Node) -> None:
    node.environ |= {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "no"}
    env = node.prepare(engines=0).env
    node.environ["NCCL_DEBUG"] = "later"
    assert {name: env.get(name) for name in node.environ} == {
        "PATH": str(node.directory),
        "XDG_CACHE_HOME": str(node.directory / "cache"),
        "NCCL_DEBUG": "INFO",
        "WANDB_API_KEY": None,
    }


def test_gpus_by_uuid_as_far_as_they_are_seen(node: Node) -> None:
    assert [e.gpus for e in node.prepare(engines=2).engines] == [["0"], ["1"]]
    node.has_gpus()
    assert [e.gpus for e in node.prepare(engines=2).engines] == [["GPU-a"], ["GPU-b"]]
    node.environ["CUDA_VISIBLE_DEVICES"] = "1"
    assert [e.gpus for e in node.prepare().engines] == [["GPU-b"]]
    with pytest.raises(ConfigError, match=r"need 2 GPUs, and evald sees 1 \(GPU-b\)"):
        node.prepare(engines=2)
    assert [e.gpus for e in node.prepare(device="cpu").engines] == [[]]


def test_a_gpu_in_use_is_said(node: Node) -> None:
    node.has_gpus("GPU-b, 564, 1634 MiB, python3\n")
    assert node.prepare().notes == []
    (note,) = node.prepare(engines=2).notes
    assert note.startswith("WARNING: GPU 1 (GPU-b) is in use by python3 (pid 564, 1634 MiB)")


def test_a_driver_that_fails_is_a_fault_of_the_config(node: Node) -> None:
    node.program("nvidia-smi", "echo no driver; exit 9")
    with pytest.raises(ConfigError, match=r"fleet.device: .*: no driver; fleet.device is 'cuda'"):
        node.prepare()


@pytest.mark.parametrize(
    ("fleet", "problem"),
    [
        (
            {"sglang": {"context_lenght": 1}},
            r"\[fleet.sglang\] context_lenght = 1 is no server argument .* mean context_length",
        ),
        ({"sglang": {"dtype": "int3"}}, r'\[fleet.sglang\] dtype = "int3" must be one of'),
        (
            {"engines": None, "group": [Group(name="a", engines=1, sglang={"dp-size": "two"})]},
            r"\[\[fleet.group\]\] a dp_size = \"two\" must be a whole number",
        ),
    ],
)
def test_names_and_types_are_those_of_the_installed_sglang(
    node: Node, fleet: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        node.prepare(**fleet)


def test_a_fault_of_all_groups_is_said_once(node: Node) -> None:
    groups = [Group(name="a", engines=1), Group(name="b", engines=1)]
    with pytest.raises(ConfigError) as caught:
        node.prepare(engines=None, group=groups, sglang={"context_lenght": 1})
    assert len(caught.value.problems) == 1


def test_sglang_that_cannot_be_asked(node: Node) -> None:
    plan = node.prepare(python="/nowhere/python", sglang={"no_such_argument": 1})
    assert plan.arguments is None
    (note,) = plan.notes
    assert note.startswith("WARNING: names and types of server arguments are not checked: cannot")
    with pytest.raises(ConfigError, match="cannot ask the SGLang of /nowhere/python"):
        node.prepare(python="/nowhere/python", inherit=Inherit(command="--tp-size 2"))


def test_what_is_inherited_reaches_the_command_line(node: Node) -> None:
    fleet = node.fleet(
        engines=None,
        group=[Group(name="a", engines=1, gpus_per_engine=2), Group(name="b", engines=2)],
        inherit=Inherit(command="--tp 8 --context-length 4096 --dtype bfloat16 --port 1"),
        sglang={"dtype": "auto"},
    )
    plan = prepare_fleet(fleet, environ=node.environ)
    assert plan.context_len == 4096
    lines = explain_fleet(fleet, plan)
    text = "\n".join(lines)
    assert [line for line in lines if line.startswith("engine ")] == [
        "engine a-0 on GPU 0, 1:",
        "engine b-0 on GPU 2:",
        "engine b-1 on GPU 3:",
    ]
    line = lines[1]
    assert line.startswith(
        f"  {node.python} -W ignore -m sglang.launch_server --schedule-policy=lpm"
    )
    assert "--context-length=4096" in line
    assert "--tp-size=2" in line
    assert "--port PORT --weight-version NONCE --config KEY.yaml" in line
    assert text.count("server arguments of group") == 2
    assert 'dtype = "auto"  (from [fleet.sglang])' in text
    assert "context_length = 4096  (from [fleet.inherit] command)" in text
    assert "not inherited: port = 1: evald takes a fresh port for each launch" in text
    assert "server arguments of all engines:" in "\n".join(
        explain_fleet(node.fleet(), node.prepare())
    )


def test_a_rollout_engine_that_is_away_is_known_from_last_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = ConfigError([f"fleet.inherit.url: no answer from {URL}"])
    with pytest.raises(ConfigError, match=r"fleet\.inherit\.url"):
        node.prepare(inherit=Inherit(url=URL))

    def answer(url: str, key: str | None) -> str:
        del url, key
        return "--context-length 512 --dtype float32"

    with monkeypatch.context() as patch:
        patch.setattr(inherit, "fetch_launch_command", answer)
        first = node.prepare(inherit=Inherit(url=URL))
    assert first.notes == []
    assert (node.engines_dir / prepare.REMEMBERED).is_file()

    def no_answer(url: str, key: str | None) -> str:
        del url, key
        raise away

    monkeypatch.setattr(inherit, "fetch_launch_command", no_answer)
    again = node.prepare(inherit=Inherit(url=URL, without=["dtype"]))
    assert again.context_len == 512
    assert again.engines[0].resolved.value("dtype") is None
    assert [note.partition(":")[0] for note in again.notes] == ["WARNING"]
    assert str(node.engines_dir / prepare.REMEMBERED) in again.notes[0]
    with pytest.raises(ConfigError, match="no answer"):
        node.prepare(inherit=Inherit(url="http://127.0.0.1:2"))
