"""Starts Slurm on this machine, from Debian's slurm-wlm and munge."""

import contextlib
import os
import pathlib
import pwd
import shutil
import socket
import subprocess
import time

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")

# Partition `high` preempts jobs in `low` after a grace period of 60 seconds.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=30
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,bf_resolution=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""


def missing() -> str | None:
  """Returns why Slurm cannot be started here, None if it can."""
  for program in NEEDED:
    if not shutil.which(program, path=_path()):
      return f"{program} is not installed (Debian: slurm-wlm, munge)"
  if os.geteuid():
    return "slurmd needs to be started by root"
  return None


@contextlib.contextmanager
def started(folder: pathlib.Path):
  """Starts Slurm; yields the environment variables for its commands."""
  for name in ("state", "spool"):
    (folder / name).mkdir()
  key = folder / "munge.key"
  key.write_bytes(os.urandom(128))
  key.chmod(0o400)
  folder.chmod(0o755)
  ports = [_free_port(), _free_port()]
  conf = folder / "slurm.conf"
  conf.write_text(
    CONF.format(
      host=socket.gethostname().split(".")[0],
      folder=folder,
      controller=ports[0],
      daemon=ports[1],
      user=pwd.getpwuid(os.geteuid()).pw_name,
      cpus=os.cpu_count(),
    )
  )
  environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(conf)}
  munge = [
    "munged",
    "--foreground",
    "--force",
    f"--key-file={key}",
    f"--socket={folder / 'munge.socket'}",
    f"--pid-file={folder / 'munged.pid'}",
    f"--log-file={folder / 'munged.log'}",
    f"--seed-file={folder / 'munged.seed'}",
  ]
  with contextlib.ExitStack() as stack:
    for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
      log = stack.enter_context((folder / f"{command[0]}.out").open("w"))
      process = subprocess.Popen(
        command, env=environment, stdout=log, stderr=log
      )
      stack.callback(process.wait)
      stack.callback(process.terminate)
      time.sleep(1)
    _wait_for_node(environment, folder)
    yield environment


def _wait_for_node(environment, folder) -> None:
  deadline = time.monotonic() + 600
  while time.monotonic() < deadline:
    found = subprocess.run(
      ["sinfo", "--noheader", "--format=%T"],
      env=environment,
      capture_output=True,
      text=True,
      check=False,
    )
    if "idle" in found.stdout:
      return
    time.sleep(0.5)
  logs = [path.read_text()[-2000:] for path in folder.glob("*.log")]
  raise RuntimeError(f"Slurm does not start: {found}\n" + "\n".join(logs))


def _path() -> str:
  return os.environ["PATH"] + ":/usr/sbin:/sbin"


def _free_port() -> int:
  with socket.socket() as free:
    free.bind(("localhost", 0))
    return free.getsockname()[1]
