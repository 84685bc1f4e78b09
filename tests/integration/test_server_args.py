"""The server arguments of the real installed SGLang, asked once in CPU mode."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evald.config import Fleet, Inherit
from evald.engines.argument import ServerArguments
from evald.engines.environment import engine_env
from evald.engines.inherit import read_inherited
from evald.engines.inherit_table import NEEDS_WIDTH, NEVER_INHERITED, NOT_ON_CPU, WIDTHS
from evald.engines.plan import CPU_FLAGS, DEFAULT_FLAGS
from evald.engines.server_args import STANDIN, ask_server_arguments, default_cache_dir
from evald.engines.settings import Resolved, check_settings, command_line, resolve_settings
from evald.engines.sglang_table import RESERVED
from evald.errors import ConfigError

ENV = engine_env(Fleet(model="/m", device="cpu"), os.environ)
# what coverage measures the subprocess by
ENV |= {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}

ROLLOUT = """
NCCL_CUMEM_ENABLE=0 python3 -m sglang.launch_server --model-path /ckpt/rollout --host 0.0.0.0 \\
  --port 30000 --nccl-port 31000 --dist-init-addr 10.0.0.1:5000 --nnodes 1 --trust-remote-code \\
  --tp 8 --ep 8 --dp-size 8 --enable-dp-attention --enable-dp-lm-head --moe-a2a-backend deepep \\
  --deepep-mode auto --moe-dense-tp-size 1 --ep-num-redundant-experts 16 --enable-eplb \\
  --mem-fraction-static 0.7 --context-length 32k --chunked-prefill-size 16384 \\
  --attention-backend fa3 --cuda-graph-bs-decode 1 2 4 8 --cuda-graph-max-bs-decode 256 \\
  --max-running-requests 256 --no-enable-tf32-matmul --kv-cache-dtype fp8_e4m3 \\
  --json-model-override-args '{"rope_scaling": {"factor": 4}}' --load-format dummy \\
  --enable-memory-saver --enable-weights-cpu-backup --skip-tokenizer-init --api-key s3cret \\
  --enable-return-routed-experts --skip-server-warmup --schedule-conservativeness 0.3 \\
  --speculative-algorithm EAGLE --speculative-draft-model-path /ckpt/draft \\
  --enable-hierarchical-cache --hicache-ratio 2 --hicache-storage-backend file \\
  --weight-version 17 --served-model-name policy --random-seed 1234 --log-level error
"""


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "evald"


@pytest.fixture(scope="module")
def sglang(cache_dir: Path) -> ServerArguments:
    return ask(cache_dir)


def ask(cache_dir: Path | None, python: str = sys.executable, **options: Any) -> ServerArguments:
    return ask_server_arguments(python, cpu=True, env=ENV, cache_dir=cache_dir, **options)


def four_gpu_node(sglang: ServerArguments, command: str = ROLLOUT) -> Resolved:
    inherited = read_inherited(Inherit(command=command), base=None, arguments=sglang, environ={})
    return resolve_settings(
        inherited=inherited,
        group={},
        override={"mem_fraction_static": 0.85},
        gpus_per_engine=4,
        base=DEFAULT_FLAGS,
        arguments=sglang,
    )


def test_the_installed_sglang_is_asked(sglang: ServerArguments) -> None:
    assert sglang.version == "0.5.23"
    assert len(sglang.arguments) > 500
    kinds = {
        "tp": ("tp_size", "value", "int"),
        "expert-parallel-size": ("ep_size", "value", "int"),
        "enable_dp_attention": ("enable_dp_attention", "flag", "str"),
        "enable_hicache": ("enable_hierarchical_cache", "flag", "str"),
        "enable_tf32_matmul": ("enable_tf32_matmul", "switch", "str"),
        "context_length": ("context_length", "value", "human_readable_int"),
        "cuda_graph_bs_decode": ("cuda_graph_bs_decode", "list", "int"),
        "model_checksum": ("model_checksum", "optional", "str"),
        "fp8_gemm_backend": ("fp8_gemm_runner_backend", "value", "str"),
    }
    for name, expected in kinds.items():
        argument = sglang.find(name, short=True)
        assert argument is not None
        assert (argument.dest, argument.kind, argument.type) == expected
    attention = sglang.by_dest["attention_backend"]
    assert attention.choices is not None
    assert "torch_native" in attention.choices


def test_it_is_asked_once_for_each_version(sglang: ServerArguments, cache_dir: Path) -> None:
    (file,) = cache_dir.iterdir()
    assert file.name.startswith("sglang-args-0.5.23-")
    assert ask(cache_dir) == sglang
    # The cache is what answers: another content is believed.
    file.write_text(file.read_text().replace("tp_size", "tp_sighs"))
    assert "tp_sighs" in ask(cache_dir).by_dest
    file.write_bytes(msgspec.json.encode(sglang))
    assert ask(cache_dir) == sglang


def test_the_tables_name_what_it_has(sglang: ServerArguments) -> None:
    """A name that no argument has is a typo, or a version that needs another look."""
    aliases = {option.replace("-", "_") for option in RESERVED}
    for name in [*NEVER_INHERITED, *NEEDS_WIDTH, *NOT_ON_CPU, *WIDTHS]:
        hit = any(fnmatchcase(dest, name) for dest in sglang.by_dest)
        assert hit or name in aliases, name


@pytest.mark.parametrize("flags", [DEFAULT_FLAGS, CPU_FLAGS])
def test_evalds_own_flags_are_good(sglang: ServerArguments, flags: dict[str, Any]) -> None:
    resolved = resolve_settings(
        inherited=None, group={}, override={}, gpus_per_engine=1, base=flags, arguments=sglang
    )
    assert check_settings(resolved.settings, sglang) == []


def test_a_four_gpu_node_out_of_an_eight_gpu_rollout(sglang: ServerArguments) -> None:
    resolved = four_gpu_node(sglang)
    assert check_settings(resolved.settings, sglang) == []
    words = command_line(resolved.settings, sglang)
    assert words == [
        *("--schedule-policy=lpm", "--enable-metrics", "--log-level-http=warning"),
        *("--trust-remote-code", "--mem-fraction-static=0.85", "--context-length=32000"),
        *("--chunked-prefill-size=16384", "--attention-backend=fa3"),
        *("--cuda-graph-bs-decode", "1", "2", "4", "8", "--cuda-graph-max-bs-decode=256"),
        *("--max-running-requests=256", "--no-enable-tf32-matmul", "--kv-cache-dtype=fp8_e4m3"),
        '--json-model-override-args={"rope_scaling": {"factor": 4}}',
        *("--schedule-conservativeness=0.3", "--enable-hierarchical-cache", "--hicache-ratio=2.0"),
        *("--random-seed=1234", "--tp-size=4"),
    ]
    assert {gone.name for gone in resolved.reset} == {
        *("dp_size", "ep_size", "enable_dp_attention", "enable_dp_lm_head", "moe_a2a_backend"),
        *("deepep_mode", "moe_dense_tp_size", "ep_num_redundant_experts", "enable_eplb"),
    }


#: parses words as SGLang's launcher does, and shows them as its /server_info would.
PARITY = """
import argparse, json, sys
sys.path.append(sys.argv[1])
from sglang.srt.sampling.watermarking.core import redact_watermark_command_line
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
answers = []
for words in json.load(sys.stdin):
    given = vars(parser.parse_args(words))
    unset = vars(parser.parse_args(["--model-path", "/m"]))
    changed = {name: value for name, value in given.items() if value != unset[name]}
    answers.append([changed, redact_watermark_command_line(words)])
print(json.dumps(answers))
"""


def test_sglangs_own_parser_agrees(sglang: ServerArguments) -> None:
    """What evald reads is what SGLang reads, and what it writes SGLang takes."""
    rollout = read_inherited(Inherit(command=ROLLOUT), base=None, arguments=sglang, environ={})
    read = {name: setting.value for name, setting in rollout.settings.items()}
    resolved = four_gpu_node(sglang)
    written = {name: setting.value for name, setting in resolved.settings.items()}
    argv = command_line(rollout.settings, sglang)
    ours = ["--model-path", "/m", *command_line(resolved.settings, sglang)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARITY, str(STANDIN)],
        input=json.dumps([argv, ours]),
        env=ENV,
        capture_output=True,
        check=True,
        text=True,
    )
    (theirs, launch_command), (started, _) = json.loads(done.stdout)
    # What has SGLang's default value does not show there.
    defaults = {name: sglang.by_dest[name].default for name in read | written}
    assert theirs == {name: value for name, value in read.items() if value != defaults[name]}
    assert started == {name: value for name, value in written.items() if value != defaults[name]}
    with server_info({"launch_command": launch_command, "tp_size": 16}) as url:
        inherit = Inherit(url=f"{url}/", api_key_env="KEY")
        live = read_inherited(inherit, base=None, arguments=sglang, environ={"KEY": "k"})
    assert {name: setting.value for name, setting in live.settings.items()} == read
    assert live.settings["tp_size"].origin == f"[fleet.inherit] url {url}"


class server_info:  # noqa: N801 - used like a function
    """A context: an HTTP server with one answer to /server_info, for API key "k"."""

    def __init__(self, info: dict[str, Any]) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                allowed = self.headers.get("Authorization") == "Bearer k"
                found = self.path == "/server_info"
                self.send_response((200 if found else 404) if allowed else 401)
                self.end_headers()
                self.wfile.write(json.dumps(info).encode())

            def log_message(self, *_args: Any) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_a_live_engine_that_cannot_be_read(sglang: ServerArguments, tmp_path: Path) -> None:
    def sentence(url: str, **key: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            read_inherited(
                Inherit(url=url, **key), base=tmp_path, arguments=sglang, environ={"KEY": "k"}
            )
        return caught.value.problems[0]

    (tmp_path / "key").write_text("k\n")
    with server_info({"launch_command": None, "version": "0.5.23"}) as url:
        assert "wants another API key (answer 401)" in sentence(url)
        assert "does not say how it was launched" in sentence(url, api_key_file="key")
        assert "answers 404" in sentence(f"{url}/elsewhere", api_key_env="KEY")
    gone = sentence(url)
    assert gone.startswith(f"fleet.inherit.url: cannot ask {url} for its server arguments: ")
    with server_info({"launch_command": "Engine(a=<object>)"}) as url:
        assert "was started from Python" in sentence(url, api_key_env="KEY")


def test_a_live_engine_of_the_python_class(sglang: ServerArguments) -> None:
    call = "Engine(model_path='/m', tp_size=8, trust_remote_code=True, dtype=None)"
    with server_info({"launch_command": call}) as url:
        inherit = Inherit(url=url, api_key_env="KEY")
        live = read_inherited(inherit, base=None, arguments=sglang, environ={"KEY": "k"})
    read = {name: setting.value for name, setting in live.settings.items()}
    assert read == {"model_path": "/m", "tp_size": 8, "trust_remote_code": True}


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_that_cannot_answer(tmp_path: Path) -> None:
    def sentence(python: str, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            ask(None, python, **options)
        return caught.value.problems[0]

    what = "cannot ask the SGLang of"
    assert sentence(str(tmp_path / "gone")).startswith(what)
    assert sentence("/bin/true").endswith("its answer is no JSON; is it a Python?")
    without = script(tmp_path / "without", f'exec {sys.executable} -S "$@"')
    assert sentence(without).endswith(
        "no module named sglang; set [fleet] python to one that has SGLang"
    )
    assert "exit code 3" in sentence(script(tmp_path / "silent", "exit 3"))
    slow = script(tmp_path / "slow", "exec sleep 60")
    assert "no answer after 0.2 s" in sentence(slow, timeout_s=0.2)


def test_a_cache_that_cannot_be_written_or_read_is_done_without(
    sglang: ServerArguments, cache_dir: Path, tmp_path: Path
) -> None:
    (remembered,) = cache_dir.iterdir()
    answers = tmp_path / "answers"
    answers.mkdir()
    identity = json.dumps({"version": "9", "python": "p", "folders": [], "changed_ns": 1})
    (answers / "identity").write_text(identity)
    arguments = json.loads(remembered.read_text())["arguments"]
    (answers / "arguments").write_text(json.dumps(arguments))
    fake = script(tmp_path / "python", f'exec cat {answers}/"$4"')
    (tmp_path / "file").touch()
    expected = ServerArguments(version="9", arguments=sglang.arguments)
    assert ask(tmp_path / "file", fake) == expected
    # one that is torn is written anew
    assert ask(tmp_path / "cache", fake) == expected
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    file.write_text("{")
    assert ask(tmp_path / "cache", fake) == expected
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("environ", "directory"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, Path("/c/evald")),
        ({"HOME": "/h"}, Path("/h/.cache/evald")),
        ({}, None),
    ],
)
def test_default_cache_dir(environ: dict[str, str], directory: Path | None) -> None:
    assert default_cache_dir(environ) == directory
