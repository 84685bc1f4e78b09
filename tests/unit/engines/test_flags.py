from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from evald.config import Fleet
from evald.engines.flags import (
    CPU_LAUNCHER,
    LaunchCommand,
    default_max_requests,
    engine_env,
    gpus_for,
    launch_command,
)
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
    *, index: int = 0, environ: dict[str, str] | None = None, **fleet: Any
) -> LaunchCommand:
    return launch_command(
        Fleet(model="/models/base", **fleet),
        port=20123,
        nonce="n0nce",
        config_file=Path("/tmp/e0.yaml"),
        index=index,
        environ=ENVIRON if environ is None else environ,
    )


def test_a_gpu_engine() -> None:
    launch = command(gpus_per_engine=2, index=1, python="/opt/sglang/bin/python")
    assert launch.argv == [
        *("/opt/sglang/bin/python", "-W", "ignore", "-m", "sglang.launch_server"),
        *("--schedule-policy=lpm", "--enable-metrics", "--log-level-http=warning"),
        *("--model-path", "/models/base", "--device", "cuda", "--tp-size", "2"),
        *("--host", "127.0.0.1", "--port", "20123", "--weight-version", "n0nce"),
        *("--config", "/tmp/e0.yaml"),
    ]
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "2,3"
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
    launch = launch_command(Fleet(model="m"), port=1, nonce="n", config_file=path, environ=ENVIRON)
    launch.write_config_file()
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == {"api-key": launch.api_key}


def test_what_cannot_be_launched() -> None:
    with pytest.raises(ConfigError, match="port = 3 is not allowed"):
        command(sglang={"port": 3})
    with pytest.raises(ValueError, match=r"it takes \*.yaml only"):
        launch_command(
            Fleet(model="m"), port=1, nonce="n", config_file=Path("e0.json"), environ=ENVIRON
        )


def test_environment_is_a_list_of_what_may_pass() -> None:
    fleet = Fleet(model="m", pass_env=["HF_TOKEN", "NOT_SET"])
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


def test_gpus() -> None:
    assert [gpus_for(index, 1) for index in range(3)] == ["0", "1", "2"]
    assert gpus_for(1, 4) == "4,5,6,7"
    assert gpus_for(1, 2, "4, 5,GPU-a,GPU-b") == "GPU-a,GPU-b"
    launch = command(index=1, environ={"CUDA_VISIBLE_DEVICES": "6,3"})
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "3"
    with pytest.raises(ConfigError, match=r"cannot give engine 1 its 2 GPUs: .* names 3"):
        gpus_for(1, 2, "0,1,2")


@pytest.mark.parametrize(
    ("fleet", "requests"),
    [
        (Fleet(model="m"), 256),
        (Fleet(model="m", device="cpu"), 128),
        (Fleet(model="m", sglang={"max_running_requests": 64}), 64),
        (Fleet(model="m", device="cpu", sglang={"max-running-requests": 16}), 16),
        (Fleet(model="m", sglang={"max_running_requests": 64}, max_requests=32), 32),
    ],
)
def test_requests_in_flight(fleet: Fleet, requests: int) -> None:
    assert default_max_requests(fleet) == requests
