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
# of them, so that the run is saved; exit code 75 then says that the same command
# goes on with it.
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

# Asks processes to stop, and makes them if they have not within 30 seconds.
stop_all() {
  local second
  kill -TERM "$@" 2>/dev/null || return 0
  for ((second = 0; second < 30; second++)); do
    sleep 1
    kill -0 "$@" 2>/dev/null || return 0
  done
  kill -KILL "$@" 2>/dev/null || true
}

launch_local() {
  local count="${1:-}"
  [[ "$count" =~ ^[1-9][0-9]*$ ]] ||
    die "local needs a number of processes, got '${count}'; see --help"
  shift
  [[ "${1:-}" == "--" ]] && shift
  (($# > 0)) || die "no command to run; see --help"

  JAX_COORDINATOR_ADDRESS="localhost:$(free_port)"
  export JAX_COORDINATOR_ADDRESS
  export JAX_NUM_PROCESSES="$count"
  local pids=() status=0 index
  for ((index = 0; index < count; index++)); do
    JAX_PROCESS_ID="$index" "$@" &
    pids+=("$!")
  done

  # A signal makes `wait` return without a process; the loop then waits on.
  trap 'stop_all "${pids[@]}" >/dev/null 2>&1 &' TERM INT
  while ((${#pids[@]} > 0)); do
    local finished="" code=0
    wait -n -p finished "${pids[@]}" || code=$?
    [[ -n "${finished:-}" ]] || continue
    local pid running=()
    for pid in "${pids[@]}"; do
      [[ "$pid" == "$finished" ]] || running+=("$pid")
    done
    pids=(${running[@]+"${running[@]}"})
    if ((code == 75 && status == 0)); then
      status=$code # asked to stop, as all were
    elif ((code > 0 && (status == 0 || status == 75))); then
      status=$code
      echo "launch.sh: a process failed with code $code; stopping the others" >&2
      stop_all "${pids[@]}" >/dev/null 2>&1 &
    fi
  done
  return "$status"
}

case "${1:-}" in
  local) shift && launch_local "$@" ;;
  -h | --help | help) usage ;;
  "") usage >&2 && exit 2 ;;
  *) die "unknown launcher '$1'; known: local. See --help" ;;
esac
