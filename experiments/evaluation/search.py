"""The decoding settings of an experiment: its config, changed by flags."""

import dataclasses
import math
from typing import Any

from experiments.config.training import MAX_BEAM_SIZE, MAX_LENGTH_PENALTY
from experiments.data.batch import UNK
from experiments.data.text.dataset import TranslationDataset
from experiments.decoding import Constraints
from experiments.decoding.batching import Search
from experiments.errors import UserError
from experiments.experiment import Experiment


def configured_search(experiment: Experiment, **changes) -> Search:
  """Returns the search of `config.evaluation` with changes; None is ignored."""
  config = experiment.config.evaluation
  given = {name: value for name, value in changes.items() if value is not None}
  rules = {
    name: given.pop(name)
    for name in ("min_length", "no_repeat_ngram")
    if name in given
  }
  # A tokenizer's UNK is no word; the symbols of a task begin at the same id.
  text = isinstance(experiment.data, TranslationDataset)
  _check_sampling(given)
  # Sampling has no beam: the config's beam size does not apply to it.
  usual = 1 if given.get("temperature") else config.beam_size
  search = Search(
    beam_size=max(usual, given.get("n_best", 1)),
    length_penalty=config.length_penalty,
    constraints=Constraints(banned=(UNK,) if text else (), **rules),
  )
  search = dataclasses.replace(search, **given)
  _check_limits(search, experiment.data.max_length)
  return search


def _check_limits(search: Search, max_length: int) -> None:
  for name, least, most in (
    ("n_best", 1, MAX_BEAM_SIZE),
    ("beam_size", 1, MAX_BEAM_SIZE),
    ("length_penalty", 0, MAX_LENGTH_PENALTY),
    ("max_length", 1, math.inf),
  ):
    value = getattr(search, name)
    if value is not None and value < least:
      raise UserError(f"--{name}={value}: must be at least {least}")
    if value is not None and value > most:
      raise UserError(f"--{name}={value}: must be at most {most}")
  limit = search.max_length or max_length
  if limit > max_length:
    raise UserError(
      f"--max_length={limit}: the model was built for at most {max_length}"
    )
  if search.constraints.min_length >= limit:
    raise UserError(
      f"--min_length={search.constraints.min_length}: must be less than the"
      f" maximum length, {limit}"
    )
  if search.n_best > search.beam_size:
    raise UserError(
      f"--n_best={search.n_best}: needs a --beam_size of at least as much, not"
      f" {search.beam_size}"
    )


def _check_sampling(given: dict[str, Any]) -> None:
  """Raises for flags that have no effect with, or without, sampling."""
  sampling = bool(given.get("temperature"))
  for name in ("beam_size", "n_best"):
    if sampling and given.get(name, 1) > 1:
      raise UserError(
        f"--{name}={given[name]}: sampling has no beam; leave out --{name} or"
        " --temperature"
      )
  for name in ("top_k", "seed"):
    if name in given and not sampling:
      raise UserError(
        f"--{name}={given[name]}: has no effect without sampling; add"
        " --temperature=1"
      )
