from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from small_sglang import small_sglang

from evald.config import Fleet, Group
from evald.engines.argument import ServerArguments
from evald.engines.environment import engine_env
from evald.engines.flags import CPU_LAUNCHER, LaunchCommand, launch_command
from evald.engines.plan import engine_plan
from evald.errors import ConfigError

ENVIRON = {
    "PATH": "/bin",
    "LC_TIME": "C",
    "NCCL_DEBUG": "INFO",
    "SGLANG_LOG_MS": "1",
    "SGLANG_API_KEY": "no",
    "WANDB_API_KEY": "no",
    "HF_TOKEN": "no",
    "PYTHONPATH": "/elsewhere",
    "EVALD_X": "no",
}


def command(
    *,
    index: int = 0,
    arguments: ServerArguments | None = None,
    cuda_visible: str | None = None,
    config_file: Path = Path("/tmp/e0.yaml"),
    **fleet: Any,
) -> LaunchCommand:
    config = Fleet(model="/models/base", **{"engines": 2, **fleet})
    return launch_command(
        config,
        engine_plan(config, arguments=arguments)[index],
        port=20123,
        nonce="n0nce",
        config_file=config_file,
        arguments=arguments,
        cuda_visible=cuda_visible,
        env=engine_env(config, ENVIRON),
    )


def test_a_gpu_engine() -> None:
    launch = command(gpus_per_engine=2, index=1, python="/opt/sglang/bin/python")
    assert launch.argv == [
        *("/opt/sglang/bin/python", "-W", "ignore", "-m", "sglang.launch_server"),
        *("--schedule-policy=lpm", "--enable-metrics", "--log-level-http=warning"),
        *("--tp-size=2", "--max-running-requests=256", "--cuda-graph-max-bs-decode=256"),
        *("--model-path", "/models/base", "--device", "cuda"),
        *("--host", "127.0.0.1", "--port", "20123", "--weight-version", "n0nce"),
        *("--config", "/tmp/e0.yaml"),
    ]
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert launch.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "SGLANG_USE_CPU_ENGINE" not in launch.env


def test_a_cpu_engine() -> None:
    launch = command(device="cpu")
    assert launch.argv[:4] == [sys.executable, "-W", "ignore", str(CPU_LAUNCHER)]
    assert CPU_LAUNCHER.is_file()
    words = " ".join(launch.argv)
    for flag in (
        "--attention-backend=torch_native --sampling-backend=pytorch --grammar-backend=none",
        "--disable-overlap-schedule --max-total-tokens=65536 --max-running-requests=128",
        "--sleep-on-idle",
        "--device cpu",
    ):
        assert flag in words
    assert "--tp-size" not in words
    assert "CUDA_VISIBLE_DEVICES" not in launch.env
    recipe = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    }
    assert recipe.items() <= launch.env.items()


def test_own_flags_win_over_the_defaults() -> None:
    table = {
        "mem_fraction_static": 0.8,
        "schedule-policy": "fcfs",
        "enable_metrics": False,
        "trust_remote_code": True,
        "cuda_graph_bs": [1, 2, 4],
        "custom_weight_loader": [],
        "json_model_override_args": {"a": 1},
        "chat_template": "-strange",
    }
    launch = command(sglang=table)
    own = launch.argv[
        launch.argv.index("--schedule-policy=fcfs") : launch.argv.index("--model-path")
    ]
    assert own == [
        "--schedule-policy=fcfs",
        "--log-level-http=warning",
        "--mem-fraction-static=0.8",
        "--trust-remote-code",
        *("--cuda-graph-bs", "1", "2", "4"),
        '--json-model-override-args={"a": 1}',
        "--chat-template=-strange",
    ]
    assert launch.config == {"api-key": launch.api_key, "enable-metrics": False}


def test_each_launch_has_its_own_key_and_hides_it(tmp_path: Path) -> None:
    first, second = command(), command()
    assert first.api_key != second.api_key
    assert len(first.api_key) == 64
    assert not any(first.api_key in word for word in first.argv)
    assert first.api_key not in first.env.values()
    path = tmp_path / "e0.yaml"
    path.touch(0o644)
    launch = command(config_file=path)
    launch.write_config_file()
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == {"api-key": launch.api_key}


def test_what_cannot_be_launched() -> None:
    with pytest.raises(ConfigError, match="port = 3 is not allowed"):
        command(sglang={"port": 3})
    with pytest.raises(ValueError, match=r"it takes \*.yaml only"):
        command(config_file=Path("e0.json"))


def test_environment_is_a_list_of_what_may_pass() -> None:
    fleet = Fleet(model="m", device="cpu", pass_env=["HF_TOKEN", "NOT_SET"])
    inherited = {key: value for key, value in engine_env(fleet, ENVIRON).items() if key in ENVIRON}
    assert inherited == {
        "PATH": "/bin",
        "LC_TIME": "C",
        "NCCL_DEBUG": "INFO",
        "SGLANG_LOG_MS": "1",
        "HF_TOKEN": "no",
    }


def test_environment_of_the_operator_wins_over_the_recipe() -> None:
    fleet = Fleet(model="m", device="cpu")
    env = engine_env(fleet, {"OMP_NUM_THREADS": "4", "SGLANG_USE_CPU_ENGINE": "0"})
    assert env["OMP_NUM_THREADS"] == "4"
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"


def test_gpus_as_claimed() -> None:
    launch = command(engines=1, gpus_per_engine=2, cuda_visible="6,3")
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "6,3"


def test_a_group_has_its_own_flags() -> None:
    groups = [
        Group(name="one", engines=1),
        Group(name="pair", engines=1, gpus_per_engine=2, sglang={"dtype": "float32"}),
    ]
    one, pair = (command(index=i, engines=None, group=groups) for i in range(2))
    assert not any(word.startswith(("--tp-size", "--dtype")) for word in one.argv)
    assert {"--tp-size=2", "--dtype=float32"} <= set(pair.argv)
    assert pair.env["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_what_sglang_said_of_its_arguments_decides_about_words() -> None:
    table = {"enable_hicache": True, "enable_metrics": False}
    launch = command(sglang=table, arguments=small_sglang())
    assert "--enable-hierarchical-cache" in launch.argv
    assert "--enable-metrics" not in launch.argv
    # an absent flag is false: SGLang's own parser needs no help
    assert launch.config == {"api-key": launch.api_key}
