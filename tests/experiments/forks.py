"""Runs of `experiments.train` that start at once: forks of a process that has
imported everything.

    python -m tests.experiments.forks

reads arguments of a run, as JSON, a line at a time, and answers with the
process that runs it; an empty line waits for it and answers with its status.
"""

import json
import os
import sys


def main() -> None:
  """Forks a child for each line."""
  import experiments.training.loop  # noqa: F401
  from experiments import cli, train

  child = 0
  for line in sys.stdin:
    if not line.strip():
      _, status = os.waitpid(child, 0)
      print(os.waitstatus_to_exitcode(status), flush=True)
      continue
    *arguments, log = json.loads(line)
    child = os.fork()
    if not child:
      target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
      os.dup2(target, 1)
      os.dup2(target, 2)
      sys.argv = ["train", *arguments]
      cli.run(train.main, config="config")
    print(child, flush=True)


if __name__ == "__main__":
  main()
