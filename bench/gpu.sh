#!/usr/bin/env bash
# The benches that need a GPU, on a machine with one: about four minutes, most of them one first
# start of a server, which builds its kernels. What needs torch alone runs meanwhile.
#
#   MODEL=DIR OTHER=DIR bench/gpu.sh
#
# MODEL, OTHER: a base model and the same with other weights, both below /dev/shm. MAKE_MODELS: a
# command that makes them, run while SGLang is asked for its arguments. PYTHON (python3) has SGLang,
# torch and what evald needs. SGLANG: lines for [fleet.sglang]. OUT: a folder that gets the figures
# (gpu.jsonl) and the output of each part.
#
# Once the server is up, all is over within 70 s: first the pins, then the throughput on the same
# server. Each part has its limit, and none stops the next; the exit code is 1 if one failed.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${MODEL:?base model, below /dev/shm}" "${OTHER:?the same model with other weights}"
python=${PYTHON:-python3}
out=${OUT:-$(mktemp -d)}
sglang=${SGLANG:-'attention-backend = "fa3"
sampling-backend = "pytorch"
grammar-backend = "none"
context-length = 4096
mem-fraction-static = 0.7
max-running-requests = 256'}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# kernels are built with the ninja of that environment
PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH"
export PATH
mkdir -p "$out"
rm -f "$out/failed" "$out/gpu.jsonl"

# part LIMIT_S NAME COMMAND...: its JSON lines are shown as they come, and kept; all is in NAME.log
part() {
  local limit_s=$1 name=$2 code
  shift 2
  echo "== $name, at most $limit_s s; second $SECONDS"
  timeout -k 10 "$limit_s" "$@" 2>&1 | tee "$out/$name.log" |
    awk '/^[{]"name"/ && !seen[$0]++ { print; fflush() }' | tee -a "$out/gpu.jsonl"
  code=${PIPESTATUS[0]}
  echo "== $name ended with code $code; second $SECONDS"
  if [ "$code" -ne 0 ]; then
    echo "$name (code $code)" >> "$out/failed"
    tail -n 30 "$out/$name.log"
  fi
}

# what the daemon asks SGLang before a start, kept where the daemon looks for it
ask='
import os, sys
from evald.config import Fleet
from evald.engines.environment import engine_env
from evald.engines.server_args import ask_server_arguments, default_cache_dir
env = engine_env(Fleet(model="/", engines=1, pass_env=["PYTHONPATH"]), os.environ)
ask_server_arguments(sys.executable, cpu=False, env=env, cache_dir=default_cache_dir(os.environ))
'
part 120 arguments "$python" -c "$ask" &
[ -z "${MAKE_MODELS:-}" ] || part 120 models bash -c "$MAKE_MODELS"
wait

then="$python bench/eval_throughput.py --engine gpu --config {config} --first-step 1000 --budget-s 15"
part 330 pin "$python" bench/pin.py --gpu --model "$MODEL" --other "$OTHER" \
  --fleet "[fleet.sglang]
$sglang" --budget-s 35 --then "$then" &
# evald starts no engine on a GPU that somebody else uses: the rest comes after it
for _ in $(seq 120); do
  { pgrep -f sglang.launch_server > /dev/null || ! kill -0 $!; } 2> /dev/null && break
  sleep 0.5
done
part 40 export "$python" bench/export.py --gpu
part 40 fast_load "$python" bench/fast_load.py --budget-s 25
wait

if [ -e "$out/failed" ]; then
  echo "failed: $(paste -sd, "$out/failed")"
  exit 1
fi
