from pathlib import Path

from evald.config import BlackBox, Fleet
from evald.engines.environment import engine_env
from evald.engines.server_args import default_cache_dir
from evald.postures.blackbox_process import environment

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
