#!/usr/bin/env bash
# Starts an experiment in several processes or on several machines.
#
#   ./launch.sh local N COMMAND...               N processes on this machine
#   ./launch.sh slurm [OPTION...] COMMAND...     a Slurm job
#   ./launch.sh tpu NAME [OPTION...] COMMAND...  all workers of a TPU VM slice
#   ./launch.sh k8s NAME [OPTION...] COMMAND...  a Kubernetes JobSet
#
# Examples:
#
#   ./launch.sh local 2 python -m experiments.train --config=configs/reverse.py
#   ./launch.sh slurm --nodes=4 --gpus=8 --time=12:00:00 \
#       python -m experiments.train --config=configs/multi30k.py
#   ./launch.sh tpu my-slice --zone=us-east5-a \
#       python -m experiments.train --config=configs/multi30k.py
#   ./launch.sh k8s run1 --image=IMAGE --hosts=4 --gpus=8 --claim=shared \
#       python -m experiments.train --config=configs/multi30k.py
#
# Option of every launcher:
#   --dry-run           prints the commands, the script of slurm or the manifest
#                       of k8s, and runs nothing
# Options of slurm (defaults in parentheses):
#   --nodes=N           number of machines (1)
#   --tasks=N           processes per machine, which share its GPUs evenly (1)
#   --gpus=N            GPUs per machine (0)
#   --time=H:MM:SS      time limit; the job is then requeued and resumes
#   --grace=SECONDS     time before the limit at which the run saves (120)
#   --name=NAME, --partition=NAME, --account=NAME
#   --setup=SHELL       each process runs this first: 'source venv/bin/activate'
# Options of tpu:
#   --zone=ZONE, --project=NAME
#   --dir=DIR           directory of the checkout on the workers (attention)
#   --setup=SHELL       each worker runs this first
# Options of k8s:
#   --image=IMAGE       container image whose working directory is the checkout
#   --hosts=N           number of pods (1)
#   --gpus=N            GPUs per pod (0)
#   --claim=NAME        volume claim that all pods mount at /runs
#   --restarts=N        maximum number of restarts of the JobSet (10)
#
# The processes connect through JAX's distributed runtime. Each process loads and
# computes a part of the batch. Process 0 prints and writes metrics; all processes
# write checkpoints, so the run directory must be on a disk that all of them share. If a
# process fails or hangs, the others stop. Ctrl-C, SIGTERM, preemption and a time
# limit save a checkpoint and stop the run with exit code 75; the same command then
# resumes it. (With tpu, Ctrl-C only closes the connections: stop the command on
# the workers.)
set -euo pipefail

usage() {
  sed -n '2,/^set -/p' "$0" | sed -e '/^set -/d' -e 's/^# \{0,1\}//'
}

die() {
  echo "launch.sh: $1" >&2
  exit 2
}

# Assigns --name=value options to the caller's variables of these names, and the
# remaining arguments to `command`.
read_options() {
  local known=" $1 dry-run " key value
  shift
  dry_run=0
  while (($# > 0)); do
    case "$1" in
      --)
        shift
        break
        ;;
      --dry-run) dry_run=1 ;;
      --dry-run=*) die "--dry-run takes no value" ;;
      --*=*)
        key="${1%%=*}" value="${1#*=}"
        key="${key#--}"
        # shellcheck disable=SC2086 # The names contain no spaces.
        [[ "$known" == *" $key "* ]] ||
          die "unknown option --$key; known:$(printf ' --%s' $known)"
        printf -v "$key" '%s' "$value"
        ;;
      --*) die "option $1 needs a value, $1=...; see --help" ;;
      *) break ;;
    esac
    shift
  done
  command=("$@")
  (($# > 0)) || die "no command to run; see --help"
}

# Checks that variables are numbers not below the first argument.
check_numbers() {
  local least="$1" name
  shift
  for name in "$@"; do
    if ! [[ "${!name}" =~ ^[0-9]+$ ]] || ((${!name} < least)); then
      die "--$name must be a number, at least $least; got '${!name}'"
    fi
  done
}

free_port() {
  python3 -c 'import socket
s = socket.socket()
s.bind(("localhost", 0))
print(s.getsockname()[1])'
}

# Sends SIGTERM to processes, and SIGKILL after 30 seconds.
stop_all() {
  local second
  kill -TERM "$@" 2>/dev/null || return 0
  for ((second = 0; second < 30; second++)); do
    sleep 1
    kill -0 "$@" 2>/dev/null || return 0
  done
  kill -KILL "$@" 2>/dev/null || true
}

# Counts the NVIDIA GPUs that JAX_PLATFORMS and CUDA_VISIBLE_DEVICES allow.
count_gpus() {
  if [[ ",${JAX_PLATFORMS:-cuda}," != *,cuda,* &&
    ",$JAX_PLATFORMS," != *,gpu,* || "${CUDA_VISIBLE_DEVICES:-}" == -1* ]]; then
    echo 0
  elif [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
  else
    { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true
  fi
}

launch_local() {
  local count="${1:-}"
  [[ "$count" =~ ^[1-9][0-9]*$ ]] ||
    die "local needs a number of processes, got '${count}'; see --help"
  shift
  read_options "" "$@"
  local pids=() status=0 index gpus address
  address="localhost:$(free_port)"
  gpus="$(count_gpus)"
  ((gpus % count == 0)) || die "$count processes do not share $gpus GPU(s)\
 evenly; CUDA_VISIBLE_DEVICES selects GPUs, JAX_PLATFORMS=cpu uses none"
  for ((index = 0; index < count; index++)); do
    local variables=(
      "JAX_COORDINATOR_ADDRESS=$address"
      "JAX_NUM_PROCESSES=$count"
      "JAX_PROCESS_ID=$index"
    )
    if ((count > 1 && gpus > 0)); then
      variables+=("JAX_LOCAL_DEVICE_IDS=$(seq -s, $((index * gpus / count)) \
        $(((index + 1) * gpus / count - 1)))")
    fi
    if ((dry_run)); then
      printf 'env%s\n' "$(printf ' %q' "${variables[@]}" "${command[@]}")"
      continue
    fi
    env "${variables[@]}" "${command[@]}" &
    pids+=("$!")
  done

  # The processes save a checkpoint before they exit, which may take a while. A
  # signal also makes `wait` return without a process: the loop waits again.
  trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' TERM INT
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
      status=$code # a signal stops all processes
    elif ((code > 0 && code != 75 && (status == 0 || status == 75))); then
      status=$code
      echo "launch.sh: a process failed with code $code; stopping the others" >&2
      stop_all "${pids[@]}" >/dev/null 2>&1 &
    fi
  done
  return "$status"
}

# Prints the batch script. A run that a time limit or preemption stopped has saved
# a checkpoint and is requeued; a cancelled run is not. When a task dies, the other
# tasks detect this and exit, hence --kill-on-bad-exit=0 --wait=90.
slurm_script() {
  local quoted option
  printf -v quoted '%q ' "${command[@]}"
  # The command of each task, which expands its own SLURM_ variables.
  local task="{ $setup"$'\n'"} && export JAX_PROCESS_ID=\"\$SLURM_PROCID\""
  if ((tasks > 1 && gpus > 0)); then
    local share=$((gpus / tasks))
    task+=" JAX_LOCAL_DEVICE_IDS=\"\$(seq -s, \$((SLURM_LOCALID * $share))"
    task+=" \$(((SLURM_LOCALID + 1) * $share - 1)))\""
  fi
  printf -v task '%q' "$task && exec \"\$@\""
  echo "#!/usr/bin/env bash"
  for option in job-name="$name" nodes="$nodes" ntasks-per-node="$tasks" \
    gpus-per-node="$gpus" time="$time" partition="$partition" \
    account="$account" signal="B:USR1@$grace" output="%x-%j.log"; do
    case "${option#*=}" in "" | 0) ;; *) echo "#SBATCH --$option" ;; esac
  done
  cat <<END
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
first="\$(scontrol show hostnames "\$SLURM_JOB_NODELIST" | head -n 1)"
export JAX_COORDINATOR_ADDRESS="\$first:\$((20000 + SLURM_JOB_ID % 20000))"
export JAX_NUM_PROCESSES="\$SLURM_NTASKS"
# shellcheck disable=SC2016 # Each task expands its own variables.
srun --kill-on-bad-exit=0 --wait=90 bash -c $task -- \\
  $quoted&
tasks=\$!
# scancel lets the tasks save; a signal to srun would kill them.
trap 'scancel --signal=TERM "\$SLURM_JOB_ID"' TERM USR1
while wait "\$tasks"; kill -0 "\$tasks" 2>/dev/null; do
  : # A signal interrupted wait; the tasks are saving.
done
wait "\$tasks" # returns the exit code
code=\$?
state="\$(scontrol show job "\$SLURM_JOB_ID")"
if ((code == 75)) && [[ "\$state" == *JobState=RUNNING* ]]; then
  scontrol requeue "\$SLURM_JOB_ID"
fi
exit "\$code"
END
}

launch_slurm() {
  local name="attention" nodes=1 tasks=1 gpus=0 time="" grace=120
  local partition="" account="" setup=":"
  read_options "name nodes tasks gpus time grace partition account setup" "$@"
  check_numbers 1 nodes tasks grace
  check_numbers 0 gpus
  [[ -z "$time" || "$time" =~ ^([0-9]+-)?[0-9]+:[0-9]{2}:[0-9]{2}$ ]] ||
    die "--time must be H:MM:SS or D-HH:MM:SS, such as --time=12:00:00, got '$time'"
  ((gpus % tasks == 0)) || die "--tasks=$tasks processes do not share $gpus GPUs evenly"
  if ((dry_run)); then
    slurm_script
    return
  fi
  type sbatch >/dev/null 2>&1 ||
    die "sbatch is not installed here; run this on a Slurm cluster, or add --dry-run"
  slurm_script | sbatch
}

launch_tpu() {
  local slice="${1:-}" zone="" project="" dir="attention" setup=":"
  [[ -n "$slice" && "$slice" != --* ]] ||
    die "tpu needs the name of a slice as its first argument; see --help"
  shift
  read_options "zone project dir setup" "$@"
  local quoted line
  printf -v quoted ' %q' "${command[@]}"
  line="cd $(printf '%q' "$dir") && $setup &&"
  line+=" JAX_COORDINATOR_ADDRESS=auto exec$quoted"
  local call=(gcloud compute tpus tpu-vm ssh "$slice")
  [[ -z "$zone" ]] || call+=("--zone=$zone")
  [[ -z "$project" ]] || call+=("--project=$project")
  call+=(--worker=all "--command=$line")
  if ((dry_run)); then
    printf '%q ' "${call[@]}"
    echo
    return
  fi
  type gcloud >/dev/null 2>&1 ||
    die "gcloud is not installed; install Google Cloud's CLI, or add --dry-run"
  exec "${call[@]}"
}

# Quotes words for YAML, which contains JSON.
as_json() {
  python3 -c 'import json, sys; print(", ".join(map(json.dumps, sys.argv[1:])))' \
    "$@"
}

# Prints the manifest of the JobSet.
k8s_manifest() {
  cat <<END
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $(as_json "$name")
spec:
  failurePolicy:
    maxRestarts: $restarts
  replicatedJobs:
    - name: workers
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: $hosts
          parallelism: $hosts
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 120
              containers:
                - name: train
                  image: $(as_json "$image")
                  command: [$(as_json "${command[@]}")]
                  ports:
                    - containerPort: 20000
                  env:
                    - name: JAX_COORDINATOR_ADDRESS
                      value: $name-workers-0-0.$name:20000
                    - name: JAX_NUM_PROCESSES
                      value: "$hosts"
                    - name: JAX_PROCESS_ID
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
END
  if ((gpus > 0)); then
    cat <<END
                  resources:
                    limits:
                      nvidia.com/gpu: $gpus
END
  fi
  if [[ -n "$claim" ]]; then
    cat <<END
                  volumeMounts:
                    - name: runs
                      mountPath: /runs
              volumes:
                - name: runs
                  persistentVolumeClaim:
                    claimName: $(as_json "$claim")
END
  fi
}

launch_k8s() {
  local name="${1:-}" image="" hosts=1 gpus=0 claim="" restarts=10
  [[ "$name" =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
    die "k8s needs a name first, of a-z, 0-9 and -; got '$name'. See --help"
  shift
  read_options "image hosts gpus claim restarts" "$@"
  check_numbers 1 hosts
  check_numbers 0 gpus restarts
  [[ -n "$image" ]] || die "k8s needs --image=IMAGE; see --help"
  if ((dry_run)); then
    k8s_manifest
    return
  fi
  type kubectl >/dev/null 2>&1 ||
    die "kubectl is not installed here; install it, or add --dry-run"
  k8s_manifest | kubectl apply -f -
}

case "${1:-}" in
  local | slurm | tpu | k8s) "launch_$1" "${@:2}" ;;
  -h | --help | help) usage ;;
  "") usage >&2 && exit 2 ;;
  *) die "unknown launcher '$1'; known: local, slurm, tpu, k8s. See --help" ;;
esac
