"""Public corpora: their addresses, files and checksums."""

import itertools
from typing import NamedTuple

from experiments.errors import UserError


class CorpusFile(NamedTuple):
  """One file of a public corpus."""

  path: str  # the path relative to the corpus's address
  # Hash of the content; of a .gz file, of the decompressed content, because
  # recompressing changes the bytes and not the text.
  sha256: str

  @property
  def name(self) -> str:
    """The file name: the last part of the path."""
    return self.path.rpartition("/")[2]


class PublicCorpus(NamedTuple):
  """A corpus that can be downloaded."""

  base_url: str  # the address that the paths of the files are relative to
  files: tuple[CorpusFile, ...]  # all files of the corpus
  config: str  # path of a config that trains on the corpus


# Commits of the dataset's repository. The English training text was edited
# later; results are comparable only on the same text.
_RAW = "c9be912dc05a3ebf9ae5bb5f7f58c1791cda43ab/data/task1/raw/{}.{}.gz"
_TOKENIZED = (
  "7bee46bc74186b4b6254603143610f730d40bf66/data/task1/tok/{}.lc.norm.tok.{}"
)


def _files(path: str, *digests: str) -> tuple[CorpusFile, ...]:
  """Returns the files of each split, English before German."""
  names = itertools.product(("train", "val", "test_2016_flickr"), ("en", "de"))
  return tuple(
    CorpusFile(path.format(*name), digest)
    for name, digest in zip(names, digests, strict=True)
  )


CORPORA: dict[str, PublicCorpus] = {
  # "Multi30K: Multilingual English-German Image Descriptions", Elliott et al.,
  # 2016 (https://aclanthology.org/W16-3210), task 1: raw, and lower-cased,
  # normalised and tokenised.
  "multi30k": PublicCorpus(
    "https://raw.githubusercontent.com/multi30k/dataset",
    _files(
      _RAW,
      "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
      "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
      "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
      "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
      "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
      "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
    )
    + _files(
      _TOKENIZED,
      "08925f8e0572bcd5a006702fc5fe20e2d77c6917d4eebd576fc20de6693c2119",
      "cb5a23529b65ec2061f1dc446192a9c37382b63cc75f81a0be59d34894b3a505",
      "46573ce391ae227f1c72f873392436a20ef18e0a6d518098cfbd70b77c8572ec",
      "97232bd273eceb7207f689527386a97e4be2616b18ada47576bdaf96c8ae1f00",
      "5b7f32627cf99eced828311b955dae9800bb52bc8b91cf8b6526829e605b29d2",
      "c6a33d39d48f9f510de147651316cd9d918e09ad0219df734a2f16b6baccacc4",
    ),
    config="configs/multi30k.py",
  ),
}


def find_corpus(name: str) -> PublicCorpus:
  """Returns the corpus of a name, or raises a `UserError`."""
  if name not in CORPORA:
    raise UserError(f"unknown corpus {name!r}; known: {', '.join(CORPORA)}")
  return CORPORA[name]
