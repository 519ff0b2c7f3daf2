"""Downloads a public corpus for experiments to train on.

    python -m experiments.download CORPUS DIR
    python -m experiments.download multi30k data/multi30k

CORPUS is the name of a corpus: multi30k (English-German captions, 6 MB). DIR is
the folder for its files, each of which is verified by its SHA-256. The same
command, run again, downloads only the files that are missing.
"""

import shlex
from pathlib import Path

from absl import flags

from experiments import cli
from experiments.data.text import fetch, registry

_BASE_URL = flags.DEFINE_string(
  "base_url",
  None,
  "Address of a mirror with the same paths, used instead of the corpus's own"
  " address.",
)


def main(name: str, directory: str) -> None:
  """Downloads a corpus and prints the command that trains on it."""
  corpus = registry.find_corpus(name)
  fetch.fetch(corpus, Path(directory), base_url=_BASE_URL.value)
  print(
    f"{name}: {len(corpus.files)} files in {directory}, to train on with\n"
    f"  python -m experiments.train --config={corpus.config}"
    f" --config.data.dir={shlex.quote(directory)}"
  )


if __name__ == "__main__":
  cli.run(main, positional=("CORPUS", "DIR"))
