#!/usr/bin/env bash
# Starts an experiment on several processes.
#
#   ./launch.sh local N [--] COMMAND...    N processes on this machine
#
# for example
#
#   ./launch.sh local 2 python -m experiments.train --config=configs/reverse.py
#
# The processes find each other through JAX's distributed runtime (on CPUs over
# gloo); each gets its share of the batch, and process 0 alone prints and
# writes. When one fails, the others are stopped. Ctrl-C and SIGTERM reach all
# of them, so that the run is saved and can be resumed.
set -euo pipefail

usage() {
  sed -n '2,/^set -/p' "$0" | sed -e '/^set -/d' -e 's/^# \{0,1\}//'
}

die() {
  echo "launch.sh: $1" >&2
  exit 2
}

free_port() {
  python3 -c 'import socket
s = socket.socket()
s.bind(("localhost", 0))
print(s.getsockname()[1])'
}

launch_local() {
  local count="${1:-}"
  [[ "$count" =~ ^[1-9][0-9]*$ ]] ||
    die "local needs a number of processes, got '${count}'; see --help"
  shift
  [[ "${1:-}" == "--" ]] && shift
  (($# > 0)) || die "no command to run; see --help"

  export JAX_COORDINATOR_ADDRESS="localhost:$(free_port)"
  export JAX_NUM_PROCESSES="$count"
  local pids=() status=0 index
  for ((index = 0; index < count; index++)); do
    JAX_PROCESS_ID="$index" "$@" &
    pids+=("$!")
  done

  # The trap runs while `wait` is interrupted; the loop then waits on.
  trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' TERM INT
  while ((${#pids[@]} > 0)); do
    local code=0 running=() pid
    wait -n "${pids[@]}" || code=$?
    for pid in "${pids[@]}"; do
      kill -0 "$pid" 2>/dev/null && running+=("$pid")
    done
    # Interrupted by a signal: everyone is still there, so wait again.
    if ((code > 0 && ${#running[@]} < ${#pids[@]})); then
      ((status == 0)) && status=$code
      ((${#running[@]} > 0)) && kill -TERM "${running[@]}" 2>/dev/null || true
    fi
    pids=(${running[@]+"${running[@]}"})
  done
  return "$status"
}

case "${1:-}" in
  local) shift && launch_local "$@" ;;
  -h | --help | help) usage ;;
  "") usage >&2 && exit 2 ;;
  *) die "unknown launcher '$1'; known: local. See --help" ;;
esac
