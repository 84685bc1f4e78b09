#!/usr/bin/env bash
# All benches on this machine, one after the other; the JSON line of each goes into one file.
#
#   bench/run_all.sh --quick [FILE]   fakes only: under 5 minutes on 2 idle cores
#   bench/run_all.sh [FILE]           at full length, and with real SGLang in CPU mode: about an hour
#
# FILE: bench/figures.jsonl unless given. A line is {"bench": ..., "took_s": ..., "figures": ...}. The
# exit code is 1 when one could not run, or was not as it promises. vs_peers needs peers in an
# environment of their own, PEERS=DIR; without it only their part is left out. For one machine with a
# GPU: gpu.sh.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
quick=false
if [ "${1:-}" = --quick ]; then quick=true; shift; fi
out=${1:-bench/figures.jsonl}
: > "$out" || exit 2
failed=()
keep='
import json, sys
try:
    figures = json.loads(sys.stdin.readline())
except ValueError:
    sys.exit(1)
print(json.dumps({"bench": sys.argv[1], "took_s": int(sys.argv[2]), "figures": figures}))
'

# bench LIMIT_S NAME ARGUMENTS...
bench() {
  local limit_s=$1 name=$2 began=$SECONDS said code
  shift 2
  echo "== $name $*" >&2
  said=$(timeout -k 20 "$limit_s" "$python" "bench/$name.py" "$@")
  code=$?
  if [ $code -ne 0 ]; then
    failed+=("$name (code $code)")
    printf '%s\n' "$said" >&2
  fi
  printf '%s\n' "$said" | tail -1 | "$python" -c "$keep" "$name${*:+ $*}" $((SECONDS - began)) |
    tee -a "$out"
  if [ "${PIPESTATUS[2]}" -ne 0 ] && [ $code -eq 0 ]; then
    failed+=("$name (its last line is no JSON)")
  fi
}

if $quick; then
  bench 60 marker_latency --quick
  bench 60 idle_cost --quick
  bench 120 watch_cost --quick
  bench 60 alert_noise --curves 10
  bench 60 hostile_answers --graders boxed_math exact
  bench 120 large_set --quick
  bench 120 fault_table --quick
  bench 60 export --quick --repeats 5
  bench 60 recovery --quick
  bench 60 fast_load --quick
  bench 120 pin --quick
  bench 120 eval_throughput --quick
  bench 240 daemon_cost --quick
  bench 180 fleet_overlap --quick
else
  bench 300 marker_latency
  bench 120 idle_cost
  bench 600 watch_cost
  bench 300 alert_noise
  bench 300 hostile_answers
  bench 1200 large_set
  bench 1800 fault_table
  bench 900 export
  bench 600 recovery
  bench 300 fast_load
  bench 1200 pin
  bench 600 eval_throughput
  bench 900 eval_throughput --engine cpu
  bench 1800 daemon_cost
  bench 600 fleet_simulation
  bench 1200 fleet_overlap
  bench 1800 vs_peers ${PEERS:+--peers "$PEERS"}
fi

if [ ${#failed[@]} -gt 0 ]; then
  printf 'not as promised, or not run: %s\n' "${failed[@]}" >&2
  exit 1
fi
