"""Faults of processes, machines and disks: no checkpoint is lost.

The default selection has one case of each kind, `-m exhaustive` the others. The
environment variable KILLS sets the number of kills in the longest test.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time

import jax
import pytest

from experiments import inference
from experiments.errors import UserError
from experiments.training import loop
from tests.experiments import processes
from tests.experiments.conftest import make_tiny
from tests.experiments.states import assert_same_bits, final_state

exhaustive = pytest.mark.exhaustive
KILLS = int(os.environ.get("KILLS", "8"))
# Seconds to wait for a condition; generous, for a busy machine.
LIMIT = 900


def wait_until(condition, process):
  deadline = time.monotonic() + LIMIT
  while not condition():
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.02)


def last_step(workdir):
  """Returns the step of the last complete checkpoint, 0 without one."""
  folders = (workdir / "checkpoints").glob("[0-9]*")
  steps = [int(path.name) for path in folders if path.name.isdecimal()]
  return max(steps, default=0)


@exhaustive
def test_resume_after_kills_is_bit_exact(tmp_path):
  config = processes.write_config(tmp_path, processes.LONG)
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  arguments = ["train", f"--config={config}"]
  processes.succeeded(*arguments, f"--workdir={whole}")
  arguments.append(f"--workdir={killed}")
  rng, done = random.Random(0), 0
  while done < KILLS:
    # Kills at a random moment after one of the next checkpoints, every fourth
    # time during the start.
    target = last_step(killed) + rng.choice([6, 12] if done else [12])
    delay = rng.uniform(0.0, 0.2)
    if done % 4 == 3:
      target, delay = 0, rng.uniform(0.0, 3.0)
    done += kill(arguments, killed, target, delay)
  assert_resumes_as(whole, killed, arguments)


def test_resume_after_a_kill_is_bit_exact(complete, tmp_path):
  killed = tmp_path / "killed"
  arguments = ["train", f"--config={complete.config}", f"--workdir={killed}"]
  while not kill(arguments, killed, target=3, delay=0.0):
    pass
  assert_resumes_as(complete.workdir, killed, arguments)


def kill(arguments, workdir, target, delay):
  """Kills a run after the checkpoint of a step; deletes it if it has ended."""
  process = processes.start(*arguments)
  while process.poll() is None and last_step(workdir) < target:
    time.sleep(0.01)
  time.sleep(delay)
  process.kill()
  _, error = process.communicate()
  assert process.returncode in (0, -signal.SIGKILL), error
  if process.returncode == 0:
    shutil.rmtree(workdir)
  return process.returncode != 0


def assert_resumes_as(whole, killed, arguments):
  """The killed run ends with the bits, metrics and results of the other."""
  resumed = last_step(killed)
  _, error = processes.succeeded(*arguments)
  assert not resumed or f"after step {resumed}" in error
  assert "damaged" not in error
  assert_same_bits(final_state(killed), final_state(whole))
  for name in ("metrics.jsonl", "eval/test.json"):
    texts = [
      [
        {key: value for key, value in line.items() if "second" not in key}
        for line in map(json.loads, (run / name).read_text().splitlines())
      ]
      if name.endswith("jsonl")
      else json.loads((run / name).read_text())["by_length"]
      for run in (killed, whole)
    ]
    assert texts[0] == texts[1]


@pytest.fixture
def small_disk(tmp_path):
  """Mounts a tmpfs with given options; skips the test where mount fails."""
  folder = tmp_path / "disk"
  folder.mkdir()

  def mount(options):
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
      done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
      pytest.skip("no mount here")
    if done.returncode:
      pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
    return folder

  yield mount
  subprocess.run(["umount", str(folder)], capture_output=True, check=False)


BIG = """
from tests.experiments.conftest import make_tiny

def get_config(arg=""):
  config = make_tiny(arg)
  config.model.hidden_size = 64
  config.train.keep_last = 9
  return config
"""


# A library that simulates a quota: in QUOTA_FOLDER, `write` fails with EDQUOT
# after QUOTA_BYTES bytes. Few kernels have file systems with quotas.
QUOTA = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static long left = -1;

static int refused(int fd, size_t count) {
  char link[64], path[PATH_MAX + 1];
  const char *folder = getenv("QUOTA_FOLDER");
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, PATH_MAX);
  if (!folder || size < 0) return 0;
  path[size] = 0;
  if (strncmp(path, folder, strlen(folder))) return 0;
  if (left < 0) left = atol(getenv("QUOTA_BYTES"));
  left = left > (long)count ? left - (long)count : 0;
  if (!left) errno = EDQUOT;
  return !left;
}

ssize_t write(int fd, const void *from, size_t count) {
  ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
  return refused(fd, count) ? -1 : real(fd, from, count);
}

ssize_t writev(int fd, const struct iovec *parts, int number) {
  ssize_t (*real)(int, const struct iovec *, int) = dlsym(RTLD_NEXT, "writev");
  size_t count = 0;
  for (int i = 0; i < number; i++) count += parts[i].iov_len;
  return refused(fd, count) ? -1 : real(fd, parts, number);
}
"""


@exhaustive
def test_a_full_quota_is_reported_and_the_run_resumes(tmp_path):
  source, library = tmp_path / "quota.c", tmp_path / "quota.so"
  source.write_text(QUOTA)
  try:
    command = ["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
  except FileNotFoundError:
    pytest.skip("no C compiler here")
  config, folder = processes.write_config(tmp_path, BIG), tmp_path / "limited"
  arguments = ["train", f"--config={config}", f"--workdir={folder / 'run'}"]
  code, _, error = processes.run(
    *arguments,
    LD_PRELOAD=str(library),
    QUOTA_FOLDER=str(folder),
    QUOTA_BYTES=str(1_500_000),
  )
  assert code == 1, error
  last = error.splitlines()[-1]
  assert last.startswith("error: "), error
  assert "Disk quota exceeded" in last
  assert "Traceback" not in error
  _, error = processes.succeeded(*arguments)
  assert "resuming after step" in error
  assert int(final_state(folder / "run").step) == 12


# 16 KiB hold the config only, 1500 KiB one or two checkpoints as well.
@exhaustive
@pytest.mark.parametrize("kibibytes", [16, 1500])
def test_a_full_disk_is_reported_and_the_run_resumes(
  kibibytes, small_disk, tmp_path
):
  config = processes.write_config(tmp_path, BIG)
  disk = small_disk(f"size={kibibytes}k")
  arguments = ["train", f"--config={config}", f"--workdir={disk / 'run'}"]
  code, _, error = processes.run(*arguments)
  assert code in (1, 2), error
  last = error.splitlines()[-1]
  assert last.startswith("error: "), error
  assert "No space left on device" in last
  assert "Traceback" not in error
  room = "remount,size=20m"
  subprocess.run(["mount", "-o", room, str(disk)], check=True)
  _, error = processes.succeeded(*arguments)
  resumes = "resumes after step" in last
  assert resumes == (kibibytes == 1500)
  assert ("resuming after step" in error) == resumes
  assert int(final_state(disk / "run").step) == 12


@exhaustive
def test_a_directory_that_turns_read_only_is_reported(running):
  process, arguments = running
  folder = arguments[2].removeprefix("--workdir=") + "/checkpoints"
  # A read-only bind mount: files opened from now on cannot be written.
  for command in (["--bind", folder, folder], ["-o", "remount,ro,bind"]):
    if command[0] == "-o":
      command.append(folder)
    try:
      subprocess.run(["mount", *command], capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
      pytest.skip(f"cannot mount here: {error}")
  try:
    _, error = process.communicate(timeout=LIMIT)
  finally:
    subprocess.run(["umount", folder], check=False)
  assert process.returncode == 1, error
  assert "Read-only file system" in error.splitlines()[-1]
  assert "the same command resumes after step" in error.splitlines()[-1]
  assert "Traceback" not in error


@pytest.fixture
def running(tmp_path):
  """A training process that does not end by itself, and its arguments."""
  config = processes.write_config(tmp_path, processes.LONG)
  arguments = ["train", f"--config={config}", f"--workdir={tmp_path / 'run'}"]
  arguments.append("--config.train.steps=1000000")
  arguments.append("--config.train.keep_last=1000000")
  process = processes.start(*arguments)
  step = tmp_path / "run" / "checkpoints" / "6"
  wait_until(step.exists, process)
  yield process, arguments
  process.kill()
  process.communicate()


@exhaustive
def test_a_second_run_in_a_directory_is_refused(running):
  process, arguments = running
  error = processes.refused(*arguments)
  assert f"another run uses this directory: process {process.pid} on" in error
  assert process.poll() is None
  process.send_signal(signal.SIGKILL)
  process.communicate()
  second = processes.start(*arguments)
  second.send_signal(signal.SIGKILL)
  _, error = second.communicate()
  assert "another run" not in error  # The killed process holds no lock.


# Code that makes step 30 a compiled program that does not end.
ENDLESS = """
import jax
from experiments.training import start
make = start.compile_train_step
def made(*arguments):
  step = make(*arguments)
  endless = jax.jit(
    lambda x: jax.lax.while_loop(lambda x: x > 0, lambda x: x * 0.5 + 1.0, x)
  )
  compiled = endless.lower(1.0).compile()
  def stepping(state, batch):
    if state.step == 30:
      open({path!r}, "w")
      compiled(1.0).block_until_ready()
    return step(state, batch)
  return stepping
start.compile_train_step = made
"""


@exhaustive
def test_a_second_interrupt_stops_at_once(tmp_path):
  config = processes.write_config(tmp_path, processes.LONG)
  workdir = tmp_path / "run"
  arguments = ("train", f"--config={config}", f"--workdir={workdir}")
  begun = tmp_path / "begun"
  (process,) = processes.crew(1, *arguments, p0=ENDLESS.format(path=str(begun)))
  wait_until(begun.exists, process)
  process.send_signal(signal.SIGINT)
  with pytest.raises(subprocess.TimeoutExpired):
    process.wait(2)
  process.send_signal(signal.SIGINT)
  _, error = process.communicate(timeout=LIMIT)
  assert process.returncode == 130, error
  assert "SIGINT: stopping after this step" in error
  assert "interrupted" in error
  assert "Traceback" not in error


# Code that makes a function that a module has imported create a file and sleep.
SLOW = """
import time
from experiments.training import {module} as module
function = module.{name}
def slow(*arguments, **options):
  open({path!r}, "w")
  time.sleep({seconds})
  return function(*arguments, **options)
module.{name} = slow
"""


@exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
  ("module", "name", "seconds", "last"),
  [("start", "make_experiment", 3, 0), ("loop", "evaluate_all", LIMIT, 12)],
)
def test_a_signal_before_or_after_the_steps_stops_the_run(
  module, name, seconds, last, number, tmp_path
):
  config = processes.write_config(tmp_path)
  workdir, begun = tmp_path / "run", tmp_path / "begun"
  arguments = ("train", f"--config={config}", f"--workdir={workdir}")
  code = SLOW.format(module=module, name=name, seconds=seconds, path=str(begun))
  (process,) = processes.crew(1, *arguments, p0=code)
  wait_until(begun.exists, process)
  process.send_signal(number)
  _, error = process.communicate(timeout=LIMIT)
  assert process.returncode == 75, error
  assert "the same command resumes" in error
  steps = (workdir / "checkpoints").iterdir()
  assert max((int(step.name) for step in steps), default=0) == last
  assert not (workdir / "eval").exists()
  _, error = processes.succeeded(*arguments)
  message = f"training is complete after step {last}"
  assert (message in error) == bool(last)
  assert (workdir / "eval" / "test.json").exists()


@exhaustive
def test_resuming_with_other_versions_warns(tmp_path):
  config = processes.write_config(tmp_path)
  run = tmp_path / "run"
  arguments = ["train", f"--config={config}", f"--workdir={run}"]
  _, error = processes.succeeded(*arguments)
  assert "other versions" not in error
  path = run / "versions.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), "jax": "0.1.2"}))
  _, error = processes.succeeded(*arguments)
  assert "began with other versions" in error
  assert f"jax: stored 0.1.2, now {jax.__version__}" in error


@exhaustive
@pytest.mark.parametrize("verbosity", [0, 1])
def test_damage_is_reported_with_a_traceback_if_verbose(
  verbosity, complete, tmp_path
):
  run = tmp_path / "run"
  shutil.copytree(complete.workdir, run)
  path = run / "checkpoints" / "12" / "state" / "_METADATA"
  path.write_bytes(path.read_bytes()[:40])
  code, _, error = processes.run(
    "evaluate", f"--workdir={run}", f"-v={verbosity}"
  )
  assert code == 2
  last = error.splitlines()[-1]
  assert last.startswith("error: checkpoint"), error
  assert "checkpoints/12 is damaged (JSONDecodeError: " in last
  assert ("Traceback" in error) == bool(verbosity)
  assert ("direct cause of the following exception" in error) == bool(verbosity)


def set_field(*path):
  *sections, field, value = path

  def change(run, _):
    raw = json.loads((run / "config.json").read_text())
    section = raw
    for name in sections:
      section = section[name]
    section[field] = value
    (run / "config.json").write_text(json.dumps(raw))

  return change


def link(name):
  def change(run, outside):
    if (run / name).is_dir():
      shutil.rmtree(run / name)
    else:
      (run / name).unlink()
    (run / name).symlink_to(outside / "victim")

  return change


def nest(run, _):
  (run / "config.json").write_text("[" * 200_000)


SPLIT = {"min_length": 1, "max_length": 2, "num_examples": 2}
HOSTILE = {
  "a split named as a relative path": set_field(
    "data", "splits", "../../victim/x", SPLIT
  ),
  "a split named as an absolute path": set_field(
    "data", "splits", "/tmp/x", SPLIT
  ),
  "a model of another module": set_field("model", "name", "os.system"),
  "an unknown field": set_field("model", "__class__", "x"),
  "an infinite seed": set_field("seed", float("inf")),
  "a link instead of results": link("eval"),
  "a link instead of figures": link("figures"),
  "a link instead of checkpoints": link("checkpoints"),
  "a link instead of the config": link("config.json"),
  "JSON of excessive depth": nest,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_restoring_a_hostile_run_directory_fails_and_writes_nothing(
  kind, complete, tmp_path
):
  outside, run = tmp_path / "outside", tmp_path / "theirs" / "run"
  shutil.copytree(complete.workdir, run)
  (outside / "victim").mkdir(parents=True)
  (outside / "victim" / "test.json").write_text("mine")
  HOSTILE[kind](run, outside)
  before = sorted(tmp_path.rglob("*"))
  with pytest.raises(UserError):
    inference.restore(run)
  assert sorted(tmp_path.rglob("*")) == before
  assert (outside / "victim" / "test.json").read_text() == "mine"


def test_training_refuses_symbolic_links_in_its_directory(tmp_path):
  run, victim = tmp_path / "run", tmp_path / "mine.txt"
  run.mkdir()
  victim.write_text("mine")
  config = make_tiny()
  for name, message in (
    (".lock", "symbolic link"),
    ("metrics.jsonl", "symbolic link"),
  ):
    (run / name).symlink_to(victim)
    with pytest.raises(UserError, match=message):
      loop.train_and_evaluate(config, run)
    (run / name).unlink()
  assert victim.read_text() == "mine"


# Code that makes one process fail to read the first checkpoint.
CANNOT_READ = """
from experiments.checkpoints import read
original = read._read
def fail_once(checkpoint, **items):
  read._read = original
  raise FileNotFoundError("a file that this process alone needs")
read._read = fail_once
"""


@exhaustive
def test_a_checkpoint_that_one_process_cannot_read_is_used_by_none(tmp_path):
  config = processes.write_config(tmp_path, processes.LONG)
  workdir = tmp_path / "run"
  arguments = ["train", f"--config={config}", f"--workdir={workdir}"]
  arguments.append("--config.train.steps=24")
  for code in ("", CANNOT_READ):
    crew = processes.crew(2, *arguments, p1=code)
    errors = [process.communicate(timeout=LIMIT)[1] for process in crew]
    assert [process.returncode for process in crew] == [0, 0], errors
  assert "checkpoints/24 cannot be read by process 1." in errors[0]
  assert "resuming after step 18" in errors[0]
  assert (workdir / "damaged" / "24").exists()
  assert (workdir / "checkpoints" / "24").exists()


@exhaustive
def test_pickles_and_code_in_a_run_directory_are_not_executed(
  complete, tmp_path
):
  run = tmp_path / "run"
  shutil.copytree(complete.workdir, run)
  trap = tmp_path / "sprung"
  code = f"open({str(trap)!r}, 'w')"
  pickled = f"cbuiltins\nexec\n(S{code!r}\ntR.".encode()
  for name in ("config.py", "configs.py", "sitecustomize.py", "jax.py"):
    (run / name).write_text(code)
  for folder in (run, run / "checkpoints" / "12", run / "tokenizer"):
    folder.mkdir(exist_ok=True)
    for name in ("state.pkl", "params.pickle", "model.npy"):
      (folder / name).write_bytes(pickled)
  processes.succeeded("evaluate", f"--workdir={run}")
  assert not trap.exists()


def endless(workdir):
  """Returns the arguments of a training run that does not end by itself."""
  config = processes.write_config(workdir.parent, processes.LONG)
  return [
    "train",
    f"--config={config}",
    f"--workdir={workdir}",
    "--config.train.steps=100000",
    "--config.train.eval_every=100000",
  ]


# Code that makes the data iterator hang after step 30.
HANGS = """
import time
from experiments.data.pipeline import Stream
next_batch = Stream.__next__
def hanging(stream):
  if stream.get_state()["next_index"] >= 30:
    time.sleep(3600)
  return next_batch(stream)
Stream.__next__ = hanging
"""


# Code that calls std::terminate once a file exists. gloo does so in one of its
# threads when another process dies.
TERMINATES = """
import ctypes, os, threading, time
def wait():
  while not os.path.exists({path!r}):
    time.sleep(0.05)
  ctypes.CDLL("libstdc++.so.6")["_ZSt9terminatev"]()
threading.Thread(target=wait, daemon=True).start()
"""


@exhaustive
@pytest.mark.parametrize(
  ("count", "fault", "message"),
  [
    (4, signal.SIGKILL, r"unhealthy .*:\n(.*task:)?1\n"),
    (4, signal.SIGSTOP, r"unhealthy .*:\n(.*task:)?1\n"),
    (4, None, r"step 30 has not ended for \d+ s in process 1; other processes"),
  ],
)
def test_the_other_processes_report_a_dead_or_stalled_one_and_exit(
  count, fault, message, tmp_path
):
  workdir, killed = tmp_path / "run", tmp_path / "killed"
  # Longer than the first step takes on a busy machine.
  seconds = LIMIT if fault else 120
  arguments = [*endless(workdir), f"--config.train.stall_seconds={seconds}"]
  crew = processes.crew(
    count,
    *arguments,
    p0=TERMINATES.format(path=str(killed)) if fault else "",
    p1="" if fault else HANGS,
    p2=TERMINATES.format(path=str(killed)) if fault else "",
  )
  try:
    wait_until(lambda: last_step(workdir) >= 24, crew[0])
    if fault:
      crew[1].send_signal(fault)
    killed.touch()
    errors = {
      index: process.communicate(timeout=LIMIT)[1]
      for index, process in enumerate(crew)
      if index != 1 or not fault
    }
    for index, error in errors.items():
      assert crew[index].returncode == 1, errors
      assert re.search(message, error), error
      # JAX may print more, if the coordinator exits first.
      report = rf"(?m)^error: process {index}: .*The same command resumes"
      assert re.search(report, error), error
      assert "Traceback" not in error
  finally:
    stop(crew)
  # Resumes with another stall_seconds, which may change between runs.
  resumed = processes.start(*arguments[:-1])
  _, error = stop_after_a_checkpoint(resumed, workdir)
  assert "resuming after step" in error


@exhaustive
@pytest.mark.parametrize(
  ("fault", "message"),
  [
    (signal.SIGSTOP, "RPC: /xla.coordination.CoordinationService/Heartbeat"),
    (signal.SIGKILL, "the leader task was preempted/died/restarted"),
  ],
)
def test_the_other_process_exits_when_the_coordinator_is_lost(
  fault, message, tmp_path
):
  workdir = tmp_path / "run"
  crew = processes.crew(2, *endless(workdir))
  first, second = crew
  try:
    wait_until(lambda: last_step(workdir) >= 24, first)
    first.send_signal(fault)
    _, error = second.communicate(timeout=LIMIT)
    assert second.returncode == 1, error
    assert message in error
    assert error.splitlines()[-1].startswith("error: process 1: ")
  finally:
    stop(crew)


# Code that makes the data iterator fail after step 30.
FAILS = """
from experiments.data.pipeline import Stream
from experiments.errors import UserError
next_batch = Stream.__next__
def failing(stream):
  if stream.get_state()["next_index"] >= 30:
    raise UserError("no data")
  return next_batch(stream)
Stream.__next__ = failing
"""


@exhaustive
@pytest.mark.parametrize("second", ["", FAILS])
def test_the_other_process_exits_after_an_error_of_one(second, tmp_path):
  crew = processes.crew(2, *endless(tmp_path / "run"), p0=FAILS, p1=second)
  errors = [process.communicate(timeout=LIMIT)[1] for process in crew]
  assert crew[0].returncode == 2, errors
  assert errors[0].splitlines()[-1] == "error: no data"
  assert crew[1].returncode == (2 if second else 1), errors
  last = errors[1].splitlines()[-1]
  assert last.startswith("error: no data" if second else "error: process 1: ")


def stop(crew):
  for process in crew:
    process.kill()
    process.wait()
    process.stderr.close()


def stop_after_a_checkpoint(process, workdir):
  before = last_step(workdir)
  wait_until(lambda: last_step(workdir) > before, process)
  process.send_signal(signal.SIGTERM)
  return process.communicate(timeout=LIMIT)
