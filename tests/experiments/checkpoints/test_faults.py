"""What machines and people do to a run: nothing is ever lost by it."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest

from experiments import inference
from experiments.errors import UserError
from experiments.training import loop
from tests.experiments import processes
from tests.experiments.conftest import make_tiny
from tests.experiments.states import assert_same_bits, final_state

pytestmark = pytest.mark.slow

# Number of kills; KILLS=50 in the environment tries more.
KILLS = int(os.environ.get("KILLS", "8"))


class Forks:
  """Starts runs that need not import anything."""

  def __init__(self, process, log):
    self._process, self.log = process, log

  def start(self, *arguments):
    return int(self._ask(json.dumps([*arguments, str(self.log)])))

  def wait(self):
    return int(self._ask(""))

  def _ask(self, line):
    self._process.stdin.write(line + "\n")
    self._process.stdin.flush()
    return self._process.stdout.readline()


@pytest.fixture
def forks(tmp_path):
  with subprocess.Popen(
    [sys.executable, "-m", "tests.experiments.forks"],
    cwd=processes.ROOT,
    env=processes.environment(),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    yield Forks(process, tmp_path / "log")
    process.stdin.close()


def test_killed_at_random_moments_it_ends_bit_for_bit_alike(tmp_path, forks):
  config = processes.write_config(tmp_path, processes.LONG)
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  arguments = (f"--config={config}", f"--workdir={whole}")
  forks.start(*arguments)
  assert forks.wait() == 0, forks.log.read_text()
  shutil.rmtree(whole)  # that one had to compile
  begin = time.monotonic()
  forks.start(*arguments)
  while not (whole / "checkpoints" / "6").exists():
    time.sleep(0.01)
  startup = time.monotonic() - begin
  assert forks.wait() == 0, forks.log.read_text()
  seconds = time.monotonic() - begin
  arguments = (f"--config={config}", f"--workdir={killed}")
  rng, kills = random.Random(0), 0
  while kills < KILLS:
    child = forks.start(*arguments)
    # Starting takes its time, whatever is left to do.
    time.sleep(rng.uniform(0.0, startup + 2 * (seconds - startup) / KILLS))
    os.kill(child, signal.SIGKILL)
    code = forks.wait()
    assert code in (0, -signal.SIGKILL), forks.log.read_text()
    kills += code != 0
    if code == 0:
      shutil.rmtree(killed)
  forks.start(*arguments)
  assert forks.wait() == 0, forks.log.read_text()
  assert "resuming after step" in forks.log.read_text()
  assert "damaged" not in forks.log.read_text()
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
  """Mounts a file system of so many KiB; skips where that is not allowed."""
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


# A file system with a quota, as processes see it: so many bytes may be written
# under a folder in all. Few kernels have quotas to test with.
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


def test_a_quota_that_is_used_up_is_told_and_loses_nothing(tmp_path):
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
  code, _, error = processes.run(*arguments)
  assert code == 0, error
  assert "resuming after step" in error
  assert int(final_state(folder / "run").step) == 12


# Room for the config, and for one or two checkpoints.
@pytest.mark.parametrize("kibibytes", [16, 1500])
def test_a_full_disk_is_told_and_loses_nothing(kibibytes, small_disk, tmp_path):
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
  code, _, error = processes.run(*arguments)
  assert code == 0, error
  went_on = "after step" in last
  assert went_on == (kibibytes == 1500)
  assert ("resuming after step" in error) == went_on
  assert int(final_state(disk / "run").step) == 12


def test_a_directory_that_turns_read_only_is_told(running):
  process, arguments = running
  folder = arguments[2].removeprefix("--workdir=") + "/checkpoints"
  # Bound to itself; what opens files in it from now on cannot write.
  for command in (["--bind", folder, folder], ["-o", "remount,ro,bind"]):
    if command[0] == "-o":
      command.append(folder)
    try:
      subprocess.run(["mount", *command], capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
      pytest.skip(f"cannot mount here: {error}")
  try:
    _, error = process.communicate(timeout=60)
  finally:
    subprocess.run(["umount", folder], check=False)
  assert process.returncode == 1, error
  assert "Read-only file system" in error.splitlines()[-1]
  assert "the same command goes on after step" in error.splitlines()[-1]
  assert "Traceback" not in error


def wait_until(condition, process):
  deadline = time.monotonic() + 120
  while not condition():
    assert process.poll() is None, process.communicate()[1]
    assert time.monotonic() < deadline
    time.sleep(0.02)


@pytest.fixture
def running(tmp_path):
  """A run that does not end by itself."""
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


def test_a_second_run_in_a_directory_is_refused(running):
  process, arguments = running
  code, _, error = processes.run(*arguments)
  assert code == 2
  assert f"another run is at work in it: process {process.pid} on" in error
  assert "Traceback" not in error
  assert process.poll() is None
  process.send_signal(signal.SIGKILL)
  process.communicate()
  second = processes.start(*arguments)
  second.send_signal(signal.SIGKILL)
  _, error = second.communicate()
  assert "another run" not in error  # the lock went with the process


# A step that does not end, deep in XLA.
ENDLESS = """
import jax
from experiments import runs
make = runs.make_step
def made(*arguments):
  step = make(*arguments)
  endless = jax.jit(
    lambda x: jax.lax.while_loop(lambda x: x > 0, lambda x: x * 0.5 + 1.0, x)
  )
  def stepping(state, batch):
    if state.step == 30:
      open({path!r}, "w")
      endless(1.0).block_until_ready()
    return step(state, batch)
  return stepping
runs.make_step = made
"""


def test_a_second_interrupt_stops_at_once(tmp_path):
  config = processes.write_config(tmp_path, processes.LONG)
  workdir = tmp_path / "run"
  arguments = ("train", f"--config={config}", f"--workdir={workdir}")
  begun = tmp_path / "begun"
  (process,) = processes.crew(1, *arguments, p0=ENDLESS.format(path=str(begun)))
  wait_until(begun.exists, process)
  time.sleep(1)  # for it to be compiled
  process.send_signal(signal.SIGINT)
  with pytest.raises(subprocess.TimeoutExpired):
    process.wait(2)
  process.send_signal(signal.SIGINT)
  _, error = process.communicate(timeout=10)
  assert process.returncode == 130, error
  assert "SIGINT: stopping after this step" in error
  assert "interrupted" in error
  assert "Traceback" not in error


# A function that takes its time, once a file tells that it has begun.
SLOW = """
import time
from experiments import {module}
function = {module}.{name}
def slow(*arguments, **options):
  open({path!r}, "w")
  time.sleep({seconds})
  return function(*arguments, **options)
{module}.{name} = slow
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
  ("module", "name", "seconds", "last"),
  [("runs", "build", 3, 0), ("loop", "_finish", 600, 12)],
)
def test_asked_to_stop_before_and_after_the_steps(
  module, name, seconds, last, number, tmp_path
):
  config = processes.write_config(tmp_path)
  workdir, begun = tmp_path / "run", tmp_path / "begun"
  arguments = ("train", f"--config={config}", f"--workdir={workdir}")
  code = SLOW.format(module=module, name=name, seconds=seconds, path=str(begun))
  (process,) = processes.crew(1, *arguments, p0=code)
  wait_until(begun.exists, process)
  process.send_signal(number)
  _, error = process.communicate(timeout=30)
  assert process.returncode == 75, error
  assert "the same command goes on" in error
  steps = (workdir / "checkpoints").iterdir()
  assert max((int(step.name) for step in steps), default=0) == last
  assert not (workdir / "eval").exists()
  code, _, error = processes.run(*arguments)
  assert code == 0, error
  assert (f"resuming after step {last}" in error) == bool(last)
  assert (workdir / "eval" / "test.json").exists()


def test_other_versions_are_named(tmp_path):
  config = processes.write_config(tmp_path)
  run = tmp_path / "run"
  arguments = ["train", f"--config={config}", f"--workdir={run}"]
  code, _, error = processes.run(*arguments)
  assert code == 0, error
  assert "other versions" not in error
  path = run / "versions.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), "jax": "0.1.2"}))
  code, _, error = processes.run(*arguments)
  assert code == 0, error
  assert "began with other versions" in error
  assert f"jax: '0.1.2' there, {jax.__version__!r} here" in error


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp("trained")
  config = processes.write_config(folder)
  code, _, error = processes.run(
    "train", f"--config={config}", f"--workdir={folder / 'run'}"
  )
  assert code == 0, error
  return folder / "run"


def set_field(*path):
  *sections, field, value = path

  def spoil(run, _):
    raw = json.loads((run / "config.json").read_text())
    section = raw
    for name in sections:
      section = section[name]
    section[field] = value
    (run / "config.json").write_text(json.dumps(raw))

  return spoil


def link(name):
  def spoil(run, outside):
    if (run / name).is_dir():
      shutil.rmtree(run / name)
    else:
      (run / name).unlink()
    (run / name).symlink_to(outside / "victim")

  return spoil


def nest(run, _):
  (run / "config.json").write_text("[" * 200_000)


SPLIT = {"min_length": 1, "max_length": 2, "num_examples": 2}
HOSTILE = {
  "a set named as a path": set_field("data", "splits", "../../victim/x", SPLIT),
  "a set of an absolute path": set_field("data", "splits", "/tmp/x", SPLIT),
  "a model that is none": set_field("model", "name", "os.system"),
  "an unknown field": set_field("model", "__class__", "x"),
  "a float without end": set_field("seed", float("inf")),
  "a link in place of results": link("eval"),
  "a link in place of pictures": link("figures"),
  "a link in place of checkpoints": link("checkpoints"),
  "a link in place of the config": link("config.json"),
  "no end of brackets": nest,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_directory_of_somebody_else_does_no_harm(kind, trained, tmp_path):
  """Nothing outside of it is read or written, and none of it is run."""
  outside, run = tmp_path / "outside", tmp_path / "theirs" / "run"
  shutil.copytree(trained, run)
  (outside / "victim").mkdir(parents=True)
  (outside / "victim" / "test.json").write_text("mine")
  HOSTILE[kind](run, outside)
  before = sorted(tmp_path.rglob("*"))
  with pytest.raises(UserError):
    inference.restore(run)
  assert sorted(tmp_path.rglob("*")) == before
  assert (outside / "victim" / "test.json").read_text() == "mine"


def test_training_writes_through_no_link(tmp_path):
  run, victim = tmp_path / "run", tmp_path / "mine.txt"
  run.mkdir()
  victim.write_text("mine")
  config = make_tiny()
  for name, message in ((".lock", "leads out"), ("metrics.jsonl", "leads out")):
    (run / name).symlink_to(victim)
    with pytest.raises(UserError, match=message):
      loop.train_and_evaluate(config, run)
    (run / name).unlink()
  assert victim.read_text() == "mine"


# A process that cannot read the first checkpoint it tries; all others can.
CANNOT_READ = """
from experiments.checkpoints import restoring
read = restoring._read
def reading(manager, step, like):
  restoring._read = read
  raise ValueError("a piece that I alone read is no piece")
restoring._read = reading
"""


def test_what_one_process_cannot_read_none_goes_on_from(tmp_path):
  config = processes.write_config(tmp_path, processes.LONG)
  workdir = tmp_path / "run"
  arguments = ["train", f"--config={config}", f"--workdir={workdir}"]
  arguments.append("--config.train.steps=24")
  for code in ("", CANNOT_READ):
    crew = processes.crew(2, *arguments, p1=code)
    errors = [process.communicate(timeout=120)[1] for process in crew]
    assert [process.returncode for process in crew] == [0, 0], errors
  assert "checkpoints/24 cannot be read by process 1." in errors[0]
  assert "resuming after step 18" in errors[0]
  assert (workdir / "damaged" / "24").exists()
  assert (workdir / "checkpoints" / "24").exists()


def test_pickles_and_code_in_a_directory_are_never_run(trained, tmp_path):
  run = tmp_path / "run"
  shutil.copytree(trained, run)
  trap = tmp_path / "sprung"
  code = f"open({str(trap)!r}, 'w')"
  pickled = f"cbuiltins\nexec\n(S{code!r}\ntR.".encode()
  for name in ("config.py", "configs.py", "sitecustomize.py", "jax.py"):
    (run / name).write_text(code)
  for folder in (run, run / "checkpoints" / "12", run / "tokenizer"):
    folder.mkdir(exist_ok=True)
    for name in ("state.pkl", "params.pickle", "model.npy"):
      (folder / name).write_bytes(pickled)
  code, _, error = processes.run("evaluate", f"--workdir={run}")
  assert code == 0, error
  assert not trap.exists()


def endless(workdir):
  """The arguments of a run that would not end by itself."""
  config = processes.write_config(workdir.parent, processes.LONG)
  return [
    "train",
    f"--config={config}",
    f"--workdir={workdir}",
    "--config.train.steps=100000",
    "--config.train.eval_every=100000",
  ]


# A process whose data never come, from some step on.
HANGS = """
import time
from experiments.data import pipeline
make = pipeline.stream
def hanging(*arguments):
  stream = make(*arguments)
  class Hangs:
    get_state, set_state = stream.get_state, stream.set_state
    def __next__(self):
      if stream.get_state()["next_index"] >= 30:
        time.sleep(600)
      return next(stream)
  return Hangs()
pipeline.stream = hanging
"""


# A process in which C++ ends everything, as gloo does in one of its threads
# when another process dies while something else is under way.
TERMINATES = """
import ctypes, os, threading, time
def wait():
  while not os.path.exists({path!r}):
    time.sleep(0.05)
  ctypes.CDLL("libstdc++.so.6")["_ZSt9terminatev"]()
threading.Thread(target=wait, daemon=True).start()
"""


@pytest.mark.parametrize(
  ("count", "fault", "message"),
  [
    (4, signal.SIGKILL, "stopped, after step "),
    (4, signal.SIGSTOP, "not been heard of for 15 s, and was"),
    (4, None, "not got beyond step 30 for 20 s, where others"),
  ],
)
def test_a_process_that_dies_or_hangs_stops_the_others(
  count, fault, message, tmp_path
):
  workdir, killed = tmp_path / "run", tmp_path / "killed"
  arguments = [*endless(workdir), "--config.train.stall_seconds=20"]
  crew = processes.crew(
    count,
    *arguments,
    p0=TERMINATES.format(path=str(killed)) if fault else "",
    p1="" if fault else HANGS,
    p2=TERMINATES.format(path=str(killed)) if fault else "",
  )
  try:
    step = workdir / "checkpoints" / "24"
    wait_until(step.exists, crew[0])
    if fault:
      crew[1].send_signal(fault)
    killed.touch()
    begin = time.monotonic()
    errors = {
      index: process.communicate(timeout=60)[1]
      for index, process in enumerate(crew)
      if index != 1 or not fault
    }
    assert time.monotonic() - begin < 45
    told = "\n".join(errors.values())
    for index, error in errors.items():
      assert crew[index].returncode == 1, told
      last = error.strip().splitlines()[-1]
      assert last.startswith(f"error: process {index}: process 1 has"), told
      assert message in last, told
      assert "the same command goes on" in last
      assert "Traceback" not in error
  finally:
    for process in crew:
      process.kill()
      process.communicate()
  # Perhaps with more patience: how long a run waits is no part of it.
  resumed = processes.start(*arguments[:-1])
  _, error = stop_after_a_step(resumed, workdir)
  assert "resuming after step" in error


@pytest.mark.parametrize(
  ("fault", "code", "message"),
  [
    (signal.SIGSTOP, 1, "process 0, which coordinates, has not answered for"),
    # By JAX, which ends its clients when their service is gone.
    (signal.SIGKILL, -signal.SIGABRT, "coordination service"),
  ],
)
def test_without_the_process_that_coordinates_the_others_stop(
  fault, code, message, tmp_path
):
  workdir = tmp_path / "run"
  first, second = processes.crew(2, *endless(workdir))
  try:
    wait_until((workdir / "checkpoints" / "24").exists, first)
    first.send_signal(fault)
    _, error = second.communicate(timeout=45)
    assert second.returncode == code, error
    assert message in error
  finally:
    for process in (first, second):
      process.kill()
      process.communicate()


def stop_after_a_step(process, workdir):
  """Has a run save one more checkpoint, and stop."""
  before = set((workdir / "checkpoints").iterdir())
  wait_until(lambda: set((workdir / "checkpoints").iterdir()) - before, process)
  process.send_signal(signal.SIGTERM)
  return process.communicate(timeout=60)
