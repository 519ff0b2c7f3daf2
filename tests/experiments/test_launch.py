"""launch.sh: its commands, and jobs of a real Slurm cluster."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from tests.experiments import processes, slurm


def launch(*arguments, **options):
  return subprocess.run(
    [processes.ROOT / "launch.sh", *map(str, arguments)],
    capture_output=True,
    text=True,
    check=False,
    **options,
  )


TRAIN = ("python", "-m", "experiments.train", "--config=a b.py")


def test_help_shows_every_launcher():
  done = launch("--help")
  assert done.returncode == 0
  for name in ("local", "slurm", "tpu", "k8s"):
    assert f"./launch.sh {name} " in done.stdout
  assert "set -" not in done.stdout


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["lsf"], "unknown launcher 'lsf'; known: local, slurm, tpu, k8s"),
    *[
      (["local", count, *TRAIN], f"a number of processes, got '{count}'")
      for count in ("", "0", "x")
    ],
    (["slurm", "--node=2", *TRAIN], "unknown option --node; known: --name"),
    (["slurm", "--nodes", "2", *TRAIN], "--nodes needs a value, --nodes=..."),
    (["slurm", "--nodes=two", *TRAIN], "--nodes must be a number, at least 1"),
    (["slurm", "--nodes=2"], "no command to run"),
    *[
      (["slurm", f"--time={time}", "--dry-run", *TRAIN], "must be H:MM:SS")
      for time in ("abc", "12", "1:00")  # for Slurm, minutes
    ],
    (["tpu", "--zone=z", *TRAIN], "tpu needs the name of a slice"),
    (["k8s", "A_B", *TRAIN], "k8s needs a name first, of a-z"),
    (["k8s", "a", *TRAIN], "k8s needs --image=IMAGE"),
    (["k8s", "a", "--image=i", "--gpus=x", *TRAIN], "--gpus must be a number"),
  ],
)
def test_an_error_is_one_line(arguments, message):
  done = launch(*arguments)
  assert done.returncode == 2
  assert done.stdout == ""
  (line,) = done.stderr.splitlines()
  assert line.startswith("launch.sh: ")
  assert message in line


def test_shellcheck_finds_nothing():
  here = str(pathlib.Path(sys.executable).parent)
  places = os.pathsep.join([here, os.environ["PATH"]])
  program = shutil.which("shellcheck", path=places)
  assert program
  subprocess.run([program, processes.ROOT / "launch.sh"], check=True)
  options = ("--nodes=2", "--gpus=8", "--setup=source venv/bin/activate")
  script = launch("slurm", *options, "--dry-run", *TRAIN).stdout
  found = subprocess.run(
    [program, "--exclude=SC1091", "-"], input=script, text=True, check=False
  )
  assert found.returncode == 0


def test_a_dry_run_of_local_prints_its_commands():
  lines = launch("local", 2, "--dry-run", *TRAIN).stdout.splitlines()
  assert len(lines) == 2
  for index, line in enumerate(lines):
    assert f"JAX_NUM_PROCESSES=2 JAX_PROCESS_ID={index} python -m" in line
    assert shlex.split(line)[-len(TRAIN) :] == list(TRAIN)


@pytest.mark.parametrize(
  ("variables", "shares"),
  [
    ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ["0,1", "2,3"]),
    ({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}, [None, None]),
    ({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cuda,cpu"}, ["0", "1"]),
    ({"CUDA_VISIBLE_DEVICES": "-1"}, [None, None]),
    ({"CUDA_VISIBLE_DEVICES": ""}, [None, None]),
  ],
)
def test_local_divides_the_gpus_among_processes(variables, shares, monkeypatch):
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  for line, share in zip(
    launch("local", 2, "--dry-run", *TRAIN).stdout.splitlines(),
    shares,
    strict=True,
  ):
    pairs = [word.split("=", 1) for word in shlex.split(line) if "JAX" in word]
    assert dict(pairs).get("JAX_LOCAL_DEVICE_IDS") == share


def test_local_rejects_gpus_that_do_not_divide(monkeypatch):
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
  error = launch("local", 2, "--dry-run", *TRAIN).stderr
  assert "2 processes do not share 3 GPU(s) evenly; CUDA_VISIBLE" in error


FAILED = "launch.sh: a process failed with code {}; stopping the others\n"


@pytest.mark.parametrize(
  ("codes", "code", "message"),
  [((75, 75), 75, ""), ((0, 75), 75, ""), ((75, 3), 3, FAILED.format(3))],
)
def test_local_reports_failures_and_no_saved_runs(codes, code, message):
  # Process 1 ends after process 0.
  end = 'sleep 0.$((3 * JAX_PROCESS_ID)); exit "${@:JAX_PROCESS_ID + 1:1}"'
  done = launch("local", 2, "bash", "-c", end, "-", *codes)
  assert done.returncode == code
  assert done.stderr == message


def test_a_slurm_script_has_the_options():
  options = ["--nodes=4", "--gpus=8", "--time=1:00:00", "--partition=p"]
  done = launch("slurm", *options, "--grace=60", "--dry-run", *TRAIN)
  script = done.stdout
  for line in (
    "--nodes=4",
    "--ntasks-per-node=1",
    "--gpus-per-node=8",
    "--time=1:00:00",
    "--partition=p",
    "--signal=B:USR1@60",
    "--requeue",
  ):
    assert f"\n#SBATCH {line}\n" in script
  assert "--account" not in script
  assert r"python -m experiments.train --config=a\ b.py" in script


def test_tpu_runs_the_command_on_all_workers():
  options = ["--zone=z", "--project=p", "--dir=code"]
  line = launch("tpu", "mine", *options, "--dry-run", *TRAIN).stdout
  # A shell expands the command twice: here and on the worker.
  read = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv))"]
  words = json.loads(
    subprocess.run(
      ["bash", "-c", f'"$@" {line}', "-", *read],
      capture_output=True,
      text=True,
      check=True,
    ).stdout
  )[1:]
  assert words[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "mine"]
  assert words[6:9] == ["--zone=z", "--project=p", "--worker=all"]
  assert words[9].startswith("--command=cd code && ")
  assert words[9].endswith(
    r"JAX_COORDINATOR_ADDRESS=auto exec python -m experiments.train"
    r" --config=a\ b.py"
  )


def test_a_jobset_is_valid_yaml_with_the_options():
  yaml = pytest.importorskip("yaml")
  options = ["--image=i:1", "--hosts=4", "--gpus=8", "--claim=shared"]
  done = launch("k8s", "run", *options, "--dry-run", *TRAIN, 'say "x": y')
  manifest = yaml.safe_load(done.stdout)
  assert manifest["kind"] == "JobSet"
  (workers,) = manifest["spec"]["replicatedJobs"]
  job = workers["template"]["spec"]
  assert job["completions"] == job["parallelism"] == 4
  pod = job["template"]["spec"]
  (container,) = pod["containers"]
  assert container["image"] == "i:1"
  assert container["command"] == [*TRAIN, 'say "x": y']
  assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
  env = {each["name"]: each.get("value") for each in container["env"]}
  assert env["JAX_COORDINATOR_ADDRESS"] == "run-workers-0-0.run:20000"
  assert env["JAX_NUM_PROCESSES"] == "4"
  assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "shared"


def test_k8s_applies_the_manifest_of_its_dry_run(tmp_path):
  kubectl = tmp_path / "kubectl"
  kubectl.write_text('#!/usr/bin/env bash\necho "kubectl $*"\ncat\n')
  kubectl.chmod(0o755)
  arguments = ("k8s", "run", "--image=i", *TRAIN)
  environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
  applied = launch(*arguments, env=environment).stdout
  manifest = launch(*arguments[:3], "--dry-run", *TRAIN).stdout
  assert applied == f"kubectl apply -f -\n{manifest}"


@pytest.fixture
def cluster(tmp_path_factory):
  if why := slurm.missing():
    pytest.skip(f"no Slurm: {why}")
  # Paths of sockets must be short.
  with slurm.started(tmp_path_factory.mktemp("slurm")) as environment:
    yield environment


def wait_for(condition, what):
  deadline = time.monotonic() + 600
  while not condition():
    assert time.monotonic() < deadline, what()
    time.sleep(0.2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tasks", [1, 2])
def test_slurm_requeues_a_stopped_job_which_resumes(cluster, tasks, tmp_path):
  """A job of a higher partition stops it, then the time limit."""
  config = processes.write_config(tmp_path, processes.LONG)
  workdir = tmp_path / "run"
  environment = {**cluster, **processes.environment(), "PATH": cluster["PATH"]}
  done = launch(
    "slurm",
    f"--tasks={tasks}",
    "--partition=low",
    "--name=t",
    sys.executable,
    "-m",
    "experiments.train",
    f"--config={config}",
    f"--workdir={workdir}",
    "--config.train.steps=1000000",
    "--config.train.eval_every=1000000",
    f"--config.train.keep_last={10**6}",
    env=environment,
    cwd=tmp_path,
  )
  assert done.returncode == 0, done.stderr
  job = re.search(r"job (\d+)", done.stdout)[1]
  log = tmp_path / f"t-{job}.log"

  def slurm_run(*command):
    subprocess.run(command, env=environment, cwd=tmp_path, check=True)

  def text():
    return log.read_text() if log.exists() else ""

  def newest():
    names = [path.name for path in (workdir / "checkpoints").iterdir()]
    return max(int(name) for name in names if name.isdecimal())

  def story():
    queue = subprocess.run(
      ["squeue", "--long"], env=environment, capture_output=True, check=False
    )
    return text(), queue

  def stopped():
    return [int(n) for n in re.findall(r"stopped after step (\d+)", text())]

  wait_for((workdir / "checkpoints" / "24").exists, story)
  higher = ["sbatch", "--partition=high", "--exclusive", "--output=/dev/null"]
  slurm_run(*higher, "--wrap=sleep 3")
  wait_for(lambda: len(stopped()) == 1, story)
  wait_for(lambda: f"resuming after step {stopped()[0]}" in text(), story)
  wait_for(lambda: newest() > stopped()[0], story)
  # The signal that Slurm sends before the time limit (--signal).
  slurm_run("scancel", "--batch", "--signal=USR1", job)
  wait_for(lambda: len(stopped()) == 2, story)
  wait_for(lambda: f"resuming after step {stopped()[1]}" in text(), story)
  slurm_run("scancel", job)
  wait_for(lambda: b" t " not in story()[1].stdout, story)
  assert "Traceback" not in text()
