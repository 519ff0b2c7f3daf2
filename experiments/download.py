"""Fetches a public corpus for experiments to train on.

    python -m experiments.download CORPUS DIR
    python -m experiments.download multi30k data/multi30k

CORPUS is a name: multi30k (English-German captions, 6 MB). DIR is where its
files go. Given again, the same command goes on from what has come, and leaves
alone what is there and right.
"""

import shlex
from pathlib import Path

from absl import flags

from experiments import cli
from experiments.data.text import fetch, registry

_BASE_URL = flags.DEFINE_string(
  "base_url",
  None,
  "Where to fetch from instead of the corpus's own source: the address of a"
  " mirror that has the same paths.",
)


def main(name: str, directory: str) -> None:
  """Fetches, as the arguments and flags say.

  Args:
    name: of the corpus.
    directory: where its files go.

  Example:
    >>> main("multi30k", "data/multi30k")  # doctest: +SKIP
  """
  corpus = registry.find_corpus(name)
  fetch.fetch(corpus, Path(directory), base_url=_BASE_URL.value)
  print(
    f"{name}: {len(corpus.files)} files in {directory}, to train on with\n"
    f"  python -m experiments.train --config={corpus.config}"
    f" --config.data.dir={shlex.quote(directory)}"
  )


if __name__ == "__main__":
  cli.run(main, positional=("CORPUS", "DIR"))
