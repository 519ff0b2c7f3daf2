"""Running the binaries as a user does: as processes."""

import os
import pathlib
import re
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

# The run of `conftest.make_tiny`, as a config file that a process can read.
CONFIG = """
from tests.experiments.conftest import make_tiny

def get_config(arg=""):
  return make_tiny(arg)
"""

# One of many steps and checkpoints, to be disturbed.
LONG = """
from tests.experiments.conftest import make_tiny

def get_config(arg=""):
  config = make_tiny(arg)
  config.train.update(
    steps=240, log_every=5, checkpoint_every=6, eval_every=60, keep_last=2
  )
  return config
"""


def environment(devices=1, **variables):
  flags = os.environ["XLA_FLAGS"]
  return {
    **os.environ,
    "XLA_FLAGS": re.sub(r"(device_count)=\d+", rf"\1={devices}", flags),
    "PYTHONPATH": str(ROOT),
    **variables,
  }


def start(module, *arguments, cwd=ROOT, stdin=False, text=True, **options):
  """Starts `python -m experiments.MODULE ARGUMENTS`."""
  return subprocess.Popen(
    [sys.executable, "-m", f"experiments.{module}", *map(str, arguments)],
    cwd=cwd,
    env=environment(**options),
    stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=text,
  )


def crew(count, module, *arguments, **special):
  """Starts processes that find each other, without a launcher.

  Args:
    count: how many.
    module: of `experiments`.
    *arguments: of each.
    **special: p2="code" runs process 2 through Python code, which gets to
      change things before the module starts.
  """
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  started = []
  for index in range(count):
    code = special.get(f"p{index}", "")
    code += f"\nimport runpy; runpy.run_module('experiments.{module}', "
    code += "run_name='__main__', alter_sys=True)"
    started.append(
      subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=environment(
          JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
          JAX_NUM_PROCESSES=str(count),
          JAX_PROCESS_ID=str(index),
        ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
      )
    )
  return started


def launch(count, module, *arguments):
  """Starts `./launch.sh local COUNT python -m experiments.MODULE ...`."""
  return subprocess.Popen(
    [
      ROOT / "launch.sh",
      "local",
      str(count),
      sys.executable,
      "-m",
      f"experiments.{module}",
      *map(str, arguments),
    ],
    cwd=ROOT,
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def run(module, *arguments, **options):
  """Runs it to its end; returns code, standard output, standard error."""
  process = start(module, *arguments, **options)
  out, error = process.communicate(timeout=600)
  return process.returncode, out, error


def write_config(folder, text=CONFIG, name="tiny.py"):
  path = folder / name
  path.write_text(text)
  return path
