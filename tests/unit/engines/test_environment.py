from importlib.metadata import distributions
from pathlib import Path

import msgspec
import pytest

from evald.config import BlackBox, Fleet
from evald.engines.environment import PLUGIN, PLUGIN_DIR, engine_env
from evald.engines.server_args import default_cache_dir
from evald.postures.blackbox.process import environment

CACHE = {"CACHE_DIRECTORY": "/var/cache/evald:/other", "HOME": "/var/lib/evald"}


def test_kernels_are_kept_where_systemd_keeps_caches() -> None:
    env = engine_env(Fleet(model="/m"), CACHE)
    assert env["TRITON_CACHE_DIR"] == "/var/cache/evald/triton"
    assert env["TVM_FFI_CACHE_DIR"] == "/var/cache/evald/tvm-ffi"
    assert env["SGLANG_CACHE_DIR"] == "/var/cache/evald/sglang"
    assert env["FLASHINFER_WORKSPACE_BASE"] == "/var/cache/evald"
    assert env["HOME"] == "/var/lib/evald"
    box = environment(BlackBox(command=["x"], env={"TRITON_CACHE_DIR": "/mine"}), CACHE)
    assert (box["TRITON_CACHE_DIR"], box["CUDA_CACHE_PATH"]) == ("/mine", "/var/cache/evald/nv")
    assert default_cache_dir(CACHE) == Path("/var/cache/evald/evald")


def test_what_the_user_has_set_wins() -> None:
    env = engine_env(Fleet(model="/m"), CACHE | {"TVM_FFI_CACHE_DIR": "/fast/tvm"})
    assert env["TVM_FFI_CACHE_DIR"] == "/fast/tvm"


def test_without_systemd_each_keeps_its_own_place() -> None:
    env = engine_env(Fleet(model="/m"), {"HOME": "/home/a"})
    assert not [name for name in env if "CACHE" in name]
    assert default_cache_dir({"HOME": "/home/a"}) == Path("/home/a/.cache/evald")


@pytest.mark.parametrize(
    ("device", "fast_pin", "there"),
    [("cuda", "auto", True), ("cuda", "off", True), ("cpu", "auto", False), ("cpu", "on", True)],
)
def test_plugin_is_on_the_engines_path(device: str, fast_pin: str, *, there: bool) -> None:
    fleet = msgspec.convert({"model": "/m", "device": device, "fast_pin": fast_pin}, Fleet)
    assert engine_env(fleet, {}).get("PYTHONPATH") == (str(PLUGIN_DIR) if there else None)


def test_plugin_stands_before_what_the_user_passes_and_on_the_users_list() -> None:
    fleet = Fleet(model="/m", pass_env=["PYTHONPATH"])
    env = engine_env(fleet, {"PYTHONPATH": "/mine", "SGLANG_PLUGINS": "theirs"})
    assert env["PYTHONPATH"] == f"{PLUGIN_DIR}:/mine"
    assert env["SGLANG_PLUGINS"] == f"theirs,{PLUGIN}"


def test_sglang_finds_the_plugin_by_its_metadata() -> None:
    [found] = distributions(path=[str(PLUGIN_DIR)])
    [point] = found.entry_points
    assert (point.group, point.name) == ("sglang.srt.plugins", PLUGIN)
    assert (PLUGIN_DIR / point.module.replace(".", "/")).with_suffix(".py").exists()
