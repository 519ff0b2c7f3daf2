"""Orbax's checkpoint manager, for each kind of storage.

Orbax writes to local folders and to Google Cloud Storage. For other storage it
works in a temporary folder; complete checkpoints are copied from there.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.checkpoints.content import arrays, digests
from experiments.checkpoints.damage import MISSING, system_error
from experiments.checkpoints.listing import COMMITTED, complete_steps
from experiments.errors import UserError
from experiments.optimization.step import TrainState
from experiments.run_directory import (
  LocalFiles,
  client_errors,
  copy_all,
  remove,
  run_path,
  write_text,
)

# What Orbax reads of each checkpoint when it lists them.
_LISTED = ("metrics", "_CHECKPOINT_METADATA")


class UnsavedCheckpointError(UserError):
  """A checkpoint could not be written; earlier ones are unchanged."""

  code = 1


class Manager(ocp.CheckpointManager):
  """Manages the checkpoints of a run in `folder`, which Orbax can write."""

  @property
  def folder(self) -> Path:
    """The folder in the run directory."""
    return run_path(self.directory)

  def saved_steps(self) -> set[int]:
    """Returns the steps of the complete checkpoints in `folder`."""
    return complete_steps(self.folder)

  def readable(self, step: int) -> Path:
    """Returns the folder from which Orbax can read a checkpoint."""
    return self.folder / str(step)

  def save_state(
    self,
    state: TrainState,
    batches: Mapping[str, Any],  # the position of the data iterator
    metrics: Mapping[str, float] | None,  # of the validation set, which rank it
  ) -> None:
    """Starts to save a checkpoint, unless this step has one."""
    step = int(state.step)
    if step in self.all_steps():
      return
    plain, position = arrays(state), dict(batches)
    # Not in `saving`: a failed collective operation is no failure to write.
    checksums = digests(plain, position)
    with self.saving():
      self.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(plain),
          batches=ocp.args.JsonSave(position),
          digests=ocp.args.JsonSave(checksums),
        ),
        metrics=None if metrics is None else {**metrics, "step": step},
        force=True,
      )

  def wait(self) -> None:
    """Waits for the end of a save, and reports its failure."""
    with self.saving():
      self.wait_until_finished()

  @contextlib.contextmanager
  def saving(self) -> Iterator[None]:
    """Turns a failure to write into an `UnsavedCheckpointError`."""
    try:
      yield
    except (OSError, ValueError, RuntimeError) as error:
      # With several processes, JAX raises this when another process has died.
      lost = isinstance(error, jax.errors.JaxRuntimeError)
      reason = system_error(error)
      if isinstance(error, MISSING):  # the folder was removed
        reason = str(error)
      if reason is None or (lost and jax.process_count() > 1):
        raise
      steps = self.saved_steps()
      last = f"after step {max(steps)}" if steps else "from the start"
      raise UnsavedCheckpointError(
        f"{self.folder}: a checkpoint cannot be written ({reason})."
        " Earlier ones are unchanged: once that is put right, the same command"
        f" resumes {last}."
      ) from error


class UploadingManager(Manager):
  """Manages checkpoints in a temporary folder, and copies them to `folder`.

  The temporary folder has the metrics of all checkpoints, which rank them, and
  the arrays of those that were saved or read since the start.
  """

  def __init__(self, folder: Path, **options: Any):
    self._folder, self._files = folder, LocalFiles(folder)
    self._whole: set[int] = set()  # in the temporary folder
    self._list()
    self._executor = ThreadPoolExecutor(1, "upload")
    self._upload: Future[None] | None = None
    super().__init__(self._files.path, **options)

  @property
  def folder(self) -> Path:
    """The folder in the run directory."""
    return self._folder

  def saved_steps(self) -> set[int]:
    """Returns the steps of the complete checkpoints in `folder`."""
    return self._uploaded

  def readable(self, step: int) -> Path:
    """Downloads a checkpoint, unless the temporary folder has it."""
    local = self._files.path / str(step)
    if step not in self._whole:
      copy_all(self._folder / str(step), local)
      self._whole.add(step)
    return local

  def save(self, step: int, *args: Any, **kwargs: Any) -> bool:
    """Starts to save and upload a checkpoint; reports earlier failures."""
    self.wait_until_finished()
    saved = super().save(step, *args, **kwargs)
    if saved:
      self._whole.add(step)
      self._upload = self._executor.submit(self._finish_and_upload)
    return saved

  def wait_until_finished(self) -> None:
    """Waits for the end of a save and its upload; raises their errors."""
    upload, self._upload = self._upload, None
    super().wait_until_finished()
    if upload:
      upload.result()

  def reload(self) -> None:
    """Lists the checkpoints in `folder` again."""
    self.wait_until_finished()
    self._list()
    super().reload()

  def close(self) -> None:
    """Waits for the end of a save and its upload; deletes the local folder."""
    with contextlib.ExitStack() as stack:
      stack.callback(self._files.discard)
      stack.callback(self._executor.shutdown)
      super().close()

  def _list(self) -> None:
    """Makes the temporary folder list the checkpoints in `folder`."""
    self._uploaded = complete_steps(self._folder)
    for step in self._local_steps() - self._uploaded:
      shutil.rmtree(self._files.path / str(step))
      self._whole.discard(step)
    for step in self._uploaded - self._local_steps():
      (self._files.path / str(step)).mkdir()
      for name in _LISTED:
        self._files.download(f"{step}/{name}")

  def _local_steps(self) -> set[int]:
    return complete_steps(self._files.path)

  def _finish_and_upload(self) -> None:
    """Makes `folder` have the checkpoints of the temporary folder."""
    super().wait_until_finished()
    local = self._local_steps()
    for step in local - self._uploaded:
      _upload(self._files.path / str(step), self._folder / str(step))
      self._uploaded.add(step)
    for step in self._uploaded - local:
      _remove(self._folder / str(step))
      self._uploaded.discard(step)


def _upload(source: Path, target: Path) -> None:
  """Copies a checkpoint, and then marks it as complete."""
  remove(target)  # the files of an interrupted upload
  for path in source.iterdir():
    if path.name != COMMITTED:
      copy_all(path, target / path.name)
  write_text(target / COMMITTED, "complete")


def _remove(checkpoint: Path) -> None:
  """Removes a checkpoint, which is incomplete if this is interrupted."""
  with client_errors(checkpoint):
    (checkpoint / COMMITTED).unlink(missing_ok=True)
  remove(checkpoint)
