"""Checkpoints of a run; the only module that knows Orbax."""

import contextlib
import errno
import functools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import preservation_policy

from experiments import digests
from experiments.errors import UserError
from experiments.steps import TrainState

FOLDER, DAMAGED = "checkpoints", "damaged"
_ITEMS = ("state", "batches", "digests")
LOWER_IS_BETTER = ("loss", "perplexity")
_OF_JAX = jax.errors.JaxRuntimeError
_NONE_LEFT = (
  "No checkpoint of the run can be read, and nothing was moved. If the files"
  " are lost, another --workdir starts over."
)


class DamagedCheckpointError(UserError):
  """A checkpoint whose files are not what was saved."""


class UnsavedCheckpointError(UserError):
  """A checkpoint that could not be written; earlier ones are as they were."""

  code = 1


@contextlib.contextmanager
def opened(
  workdir: Path,
  *,
  keep_last: int = 1,
  keep_best: int = 0,
  best_metric: str = "loss",
  read_only: bool = False,
) -> Iterator[ocp.CheckpointManager]:
  """Opens the checkpoints of a run; at the end it waits for saves.

  Args:
    workdir: the run's directory.
    keep_last: number of last checkpoints kept.
    keep_best: number of best ones kept besides.
    best_metric: decides which is best.
    read_only: whether only to restore.

  Yields:
    An Orbax manager, which saves asynchronously.

  Raises:
    UserError: if no checkpoint can be read, or, read-only, if one cannot; if
      the last one cannot be saved.

  Example:
    >>> with opened(Path("runs/reverse")) as manager:  # doctest: +SKIP
    ...   restored = restore_last(manager, like)
  """
  goodness = functools.partial(_goodness, best_metric)
  folder = workdir.absolute() / FOLDER
  if jax.process_index() == 0:
    _check_listing(folder, read_only=read_only)
  _wait_for_all("checkpoints listed")
  policy = preservation_policy.AnyPreservationPolicy(
    [
      preservation_policy.LatestN(keep_last),
      preservation_policy.BestN(
        get_metric_fn=goodness,
        n=keep_best,
        keep_checkpoints_without_metrics=False,
      ),
    ]
  )
  manager = ocp.CheckpointManager(
    folder,
    options=ocp.CheckpointManagerOptions(
      preservation_policy=None if read_only else policy,
      best_fn=goodness,
      read_only=read_only,
      enable_async_checkpointing=not read_only,
    ),
    item_names=_ITEMS,
  )
  try:
    yield manager
  except BaseException:
    # What several processes close waits for all of them, dead ones too.
    if jax.process_count() == 1:
      with contextlib.suppress(Exception):
        manager.close()
    raise
  with _saving(manager):
    manager.close()


def save(
  manager: ocp.CheckpointManager,
  state: TrainState,
  batches: Mapping[str, Any],
  metrics: Mapping[str, float] | None,
) -> None:
  """Saves a checkpoint, unless this step is saved already.

  Args:
    manager: from `opened`.
    state: the state after a step.
    batches: the position of the data iterator.
    metrics: of the validation set at this step, or None.

  Example:
    >>> save(manager, state, batches.get_state(), None)  # doctest: +SKIP
  """
  step = int(state.step)
  if step in manager.all_steps():
    return
  plain, position = _plain(state), dict(batches)
  # All processes compute these; a failure of that is no failure to write.
  found = _digests(plain, position)
  with _saving(manager):
    manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(plain),
        batches=ocp.args.JsonSave(position),
        digests=ocp.args.JsonSave(found),
      ),
      metrics=None if metrics is None else {**metrics, "step": step},
      force=True,
    )


def wait(manager: ocp.CheckpointManager) -> None:
  """Waits until what is being saved is saved.

  Args:
    manager: from `opened`.

  Raises:
    UnsavedCheckpointError: if it could not be.

  Example:
    >>> wait(manager)  # doctest: +SKIP
  """
  with _saving(manager):
    manager.wait_until_finished()


@contextlib.contextmanager
def _saving(manager: ocp.CheckpointManager) -> Iterator[None]:
  """Says of a save that failed, this one or one before, what to do about it."""
  try:
    yield
  except (OSError, ValueError, RuntimeError) as error:
    # Of several processes one may have died while the others wait for it.
    if jax.process_count() > 1 and isinstance(error, _OF_JAX):
      raise
    there = [path.name for path in _steps(Path(manager.directory))]
    last = f"after step {max(map(int, there))}" if there else "from the start"
    raise UnsavedCheckpointError(
      f"{manager.directory}: a checkpoint cannot be written"
      f" ({_reason(error)}). Earlier ones are as they were: once it can be, the"
      f" same command goes on {last}."
    ) from error


def _reason(error: Exception) -> str:
  """The system's word for what failed, or the first line of another's."""
  for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
    if os.strerror(number) in str(error):
      return os.strerror(number)
  return str(error).strip().split("\n")[0][:200]


def _steps(folder: Path) -> list[Path]:
  """The checkpoints that are complete."""
  return [path for path in folder.glob("[0-9]*") if path.name.isdecimal()]


def restore_last(
  manager: ocp.CheckpointManager, like: TrainState
) -> tuple[TrainState, Mapping[str, Any]] | None:
  """Restores the last readable checkpoint and sets damaged ones aside.

  Args:
    manager: from `opened`.
    like: a state of the same shapes (real or abstract), with the shardings to
      restore to.

  Returns:
    The state and the position of the data iterator, or None where there is
    no checkpoint yet.

  Raises:
    UserError: if there are checkpoints and none can be read.

  Example:
    >>> restored = restore_last(manager, runs.start(run))  # doctest: +SKIP
  """
  steps = sorted(manager.all_steps(), reverse=True)
  damaged: list[tuple[int, UserError]] = []
  for step in steps:
    try:
      restored = restore(manager, step, like)
    except DamagedCheckpointError as error:
      damaged.append((step, error))
      continue
    # Only now, with an older one in hand, is anything moved.
    for bad, reason in damaged:
      if jax.process_index() == 0:
        kept = _set_aside(Path(manager.directory) / str(bad))
        logging.warning("%s It is kept as %s.", reason, kept)
    _wait_for_all("damaged checkpoints set aside")
    if damaged:
      manager.reload()
    return restored
  if damaged:
    raise UserError(f"{damaged[0][1]} {_NONE_LEFT}")
  return None


def restore(
  manager: ocp.CheckpointManager, step: int, like: TrainState
) -> tuple[TrainState, Mapping[str, Any]]:
  """Restores one checkpoint.

  Args:
    manager: from `opened`.
    step: which one.
    like: as for `restore_last`.

  Returns:
    The state and the position of the data iterator.

  Raises:
    UserError: if it cannot be read, with the reason.

  Example:
    >>> like = runs.start(run)  # doctest: +SKIP
    >>> state, position = restore(manager, 500, like)  # doctest: +SKIP
  """
  folder = Path(manager.directory) / str(step)
  with _agreeing(folder):
    restored = _read(manager, step, like)
  with _agreeing(folder):
    _check_digests(restored)
  state = restored["state"]
  rng = jax.random.wrap_key_data(state["rng"])
  state = {"average": None, **state, "rng": rng}
  return TrainState(**state), restored["batches"]


def _read(manager: ocp.CheckpointManager, step: int, like: TrainState):
  """Reads this process's share, without waiting for the others.

  They might wait for it in vain, where it alone cannot read.
  """
  args = ocp.args.Composite(
    state=ocp.args.StandardRestore(_plain(like)),
    batches=ocp.args.JsonRestore(),
    digests=ocp.args.JsonRestore(),
  )
  if jax.process_count() == 1:
    return manager.restore(step, args=args)
  index = jax.process_index()
  alone = ocp.CheckpointManagerOptions(
    read_only=True,
    multiprocessing_options=ocp.options.MultiprocessingOptions(
      primary_host=index,
      active_processes={index},
      barrier_sync_key_prefix=f"process_{index}",
    ),
  )
  with ocp.CheckpointManager(
    manager.directory, options=alone, item_names=_ITEMS
  ) as reader:
    return reader.restore(step, args=args)


def _check_digests(restored) -> None:
  found = _digests(restored["state"], restored["batches"])
  saved = restored["digests"]
  for name in found | saved:
    if found.get(name) != saved.get(name):
      raise ValueError(f"{name} is not what was saved")


@contextlib.contextmanager
def _agreeing(folder: Path) -> Iterator[None]:
  """Has all processes take a checkpoint for what one of them finds it to be.

  Raises:
    UserError: naming what is wrong, in all of them.
  """
  found: UserError | None = None
  try:
    yield
  except Exception as error:  # Orbax raises whatever its layers raise.
    if isinstance(error, _OF_JAX) and jax.process_count() > 1:
      raise
    found = _verdict(folder, error)
    found.__cause__ = error
  kinds = [None, DamagedCheckpointError, UserError]
  worst = kinds.index(type(found) if found else None)
  if jax.process_count() > 1:
    worsts = multihost_utils.process_allgather(np.int32(worst)).tolist()
    worst = max(worsts)
    if worst and not (found and worst == kinds.index(type(found))):
      found = kinds[worst](
        f"checkpoint {folder} cannot be read by process {worsts.index(worst)}."
      )
  if found:
    try:
      raise found
    finally:
      del found  # or it keeps what Orbax left half done


def _verdict(folder: Path, error: Exception) -> UserError:
  """What an error says of the checkpoint it came from."""
  reason = str(error).strip().split("\n")[0][:200]
  missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
  outside = isinstance(error, (OSError, MemoryError, _OF_JAX))
  if outside and not isinstance(error, missing):
    return UserError(f"checkpoint {folder}: cannot be read ({reason})")
  if "structures do not match" in str(error):
    return UserError(
      f"checkpoint {folder} holds other arrays than this version of the model"
      f" ({reason}); use the version that wrote it"
    )
  return DamagedCheckpointError(
    f"checkpoint {folder} is damaged ({type(error).__name__}: {reason})."
  )


def parameters(
  manager: ocp.CheckpointManager,
  which: str,
  like: TrainState,
  *,
  best_metric: str = "loss",
) -> tuple[Any, str]:
  """Restores the parameters to answer with, of one checkpoint or several.

  The mean of a run's last checkpoints is often better than any of them: see
  "Averaging Weights Leads to Wider Optima and Better Generalization", Izmailov
  et al., 2018 (https://arxiv.org/abs/1803.05407).

  Args:
    manager: from `opened`.
    which: as for `choose`.
    like: as for `restore_last`.
    best_metric: decides which is best.

  Returns:
    The parameters, and the steps they come from, for a reader.

  Raises:
    UserError: if there are no such checkpoints, or one cannot be read.

  Example:
    >>> params, used = parameters(manager, "last:10", like)  # doctest: +SKIP
    >>> used  # doctest: +SKIP
    'mean of 10 steps, 7100 to 8000'
  """
  chosen = choose(manager, which, best_metric=best_metric)
  total = None
  for step in chosen:
    state, _ = restore(manager, step, like)
    params = state.evaluated
    total = params if total is None else jax.tree.map(jnp.add, total, params)
  if len(chosen) == 1:
    return total, f"step {chosen[0]}"
  mean = jax.tree.map(lambda leaf: leaf / len(chosen), total)
  return mean, f"mean of {len(chosen)} steps, {min(chosen)} to {max(chosen)}"


def choose(
  manager: ocp.CheckpointManager, which: str, *, best_metric: str = "loss"
) -> list[int]:
  """Returns the steps of checkpoints by name.

  Args:
    manager: from `opened`.
    which: "last", "best", or a step; "last:3" and "best:3" for up to three.
    best_metric: decides which is best.

  Returns:
    The steps, the last or best one last.

  Raises:
    UserError: if there are no such checkpoints.

  Example:
    >>> choose(manager, "last:2")  # doctest: +SKIP
    [400, 500]
  """
  steps = sorted(manager.all_steps())
  name, colon, number = which.partition(":")
  count = int(number) if number.isdecimal() else 1
  found: list[int] = []
  if name == "last":
    found = steps[-count:]
  elif name == "best":
    scores = {step: manager.metrics(step) for step in steps}
    ranked = [step for step in steps if scores[step]]
    ranked.sort(key=lambda step: _goodness(best_metric, scores[step]))
    found = ranked[-count:]
  elif which.isdecimal() and int(which) in steps:
    found = [int(which)]
  if not (count and found) or (colon and not number.isdecimal()):
    raise UserError(
      f"{manager.directory}: no checkpoint {which!r}; there are"
      f" {', '.join(map(str, steps)) or 'none'}"
    )
  return found


def _goodness(best_metric: str, metrics: Mapping[str, float]):
  """What checkpoints are ranked by."""
  value = metrics[best_metric]
  # Of equal ones the first is better: training on has gained nothing.
  earlier = -metrics.get("step", 0)
  return -value if best_metric in LOWER_IS_BETTER else value, earlier


def _plain(state: TrainState) -> dict[str, Any]:
  """The state as a dictionary of arrays; Orbax has no type for keys."""
  plain = {
    "step": state.step,
    "params": state.params,
    "opt_state": state.opt_state,
    "rng": _key_data(state.rng),
  }
  return plain | ({} if state.average is None else {"average": state.average})


def _digests(plain: Mapping[str, Any], batches: Mapping[str, Any]):
  """What tells a whole checkpoint from one whose bytes have changed."""
  return {**digests.of_arrays(plain), "batches": digests.of_json(batches)}


def _key_data(rng):
  if not isinstance(rng, jax.ShapeDtypeStruct):
    return jax.random.key_data(rng)
  plain = jax.eval_shape(jax.random.key_data, rng)
  return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=rng.sharding)


def _check_listing(folder: Path, *, read_only: bool) -> None:
  """Deals with checkpoints that would keep Orbax from listing the others."""
  steps = _steps(folder)
  damaged = [step for step in steps if not _has_readable_metrics(step)]
  if damaged and read_only:
    raise UserError(
      f"checkpoint {damaged[0]} is damaged (its metrics are no JSON); move it"
      f" out of {folder} to use the others"
    )
  if damaged and len(damaged) == len(steps):
    raise UserError(f"checkpoint {damaged[0]} is damaged. {_NONE_LEFT}")
  for step in damaged:
    logging.warning(
      "checkpoint %s is damaged (its metrics are no JSON). It is kept as %s.",
      step,
      _set_aside(step),
    )


def _has_readable_metrics(step: Path) -> bool:
  metrics = step / "metrics" / "metrics"
  try:
    if metrics.exists():
      json.loads(metrics.read_text())
  except ValueError:
    return False
  return True


def _wait_for_all(what: str) -> None:
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(what)


def _set_aside(checkpoint: Path) -> Path:
  """Moves a damaged checkpoint where nothing is lost and nobody trips."""
  target = checkpoint.parent.parent / DAMAGED / checkpoint.name
  while target.exists():
    target = target.with_name(target.name + "_")
  target.parent.mkdir(exist_ok=True)
  shutil.move(checkpoint, target)
  return target
