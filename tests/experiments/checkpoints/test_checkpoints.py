"""Saving, selecting and restoring checkpoints, and damaged ones."""

import contextlib
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from experiments.checkpoints import content, read, select
from experiments.checkpoints.damage import DamagedCheckpointError
from experiments.checkpoints.manager import opened
from experiments.checkpoints.storage import UnsavedCheckpointError
from experiments.config import TrainConfig
from experiments.errors import UserError
from experiments.optimization.step import TrainState

# BLEU at steps 10, 20, ...; None where the validation set was not evaluated.
BLEU = [30.0, 90.0, None, 50.0, 90.0, 10.0]
INVALID = ["35", "0", "-10", "30:2", "first", "", "last:0"]
INVALID += ["best:0", "last:", "last:x", "last:-1", "last:1.5", "last:²"]


def state_at(step, *, averaged=False):
  params = {"w": jnp.arange(3.0) * step**2, "b": jnp.float32(1 / step)}
  return TrainState(
    step=jnp.int32(step),
    params=params,
    opt_state=optax.adam(0.1).init(params),
    rng=jax.random.key(0),
    average=jax.tree.map(jnp.negative, params) if averaged else None,
  )


def ranked_by(metric):
  return TrainConfig(
    checkpoint_every=10, keep_last=9, keep_best=9, best_metric=metric
  )


@contextlib.contextmanager
def saved(folder, values=(), metric="bleu", **options):
  """Yields a manager of a folder that has a checkpoint for each value."""
  with opened(folder, ranked_by(metric)) as manager:
    for index, value in enumerate(values, 1):
      scores = None if value is None else {metric: value}
      state = state_at(10 * index, **options)
      manager.save_state(state, {"next_index": index}, scores)
    manager.wait_until_finished()
    yield manager


@pytest.mark.parametrize(
  ("which", "steps"),
  [
    ("last", [60]),
    ("last:1", [60]),
    ("last:3", [40, 50, 60]),
    ("last:6", [10, 20, 30, 40, 50, 60]),
    # Of checkpoints with equal BLEU, the earlier is better.
    ("best", [20]),
    ("best:2", [50, 20]),
    ("best:4", [10, 40, 50, 20]),
    ("30", [30]),
  ],
)
def test_choose_returns_the_steps_of_a_name(which, steps, many):
  found = select.choose(many, which, ranked_by("bleu"))
  assert found == steps


@pytest.fixture(scope="module")
def many(tmp_path_factory):
  with saved(tmp_path_factory.mktemp("many"), BLEU) as manager:
    yield manager


def test_a_full_quota_is_reported_with_a_remedy(many):
  # As TensorStore reports it, within a longer message.
  error = ValueError("UNKNOWN: Error writing x: [EDQUOT: Disk quota exceeded]")
  message = (
    r"cannot be written \(Disk quota exceeded\)\. Earlier ones are unchanged:"
    r" once that is put right, the same command resumes after step 60\."
  )
  with (
    pytest.raises(UnsavedCheckpointError, match=message) as caught,
    many.saving(),
  ):
    raise error
  assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_bug_is_not_reported_as_a_failure_to_write(error, many):
  with pytest.raises(error, match="a bug"), many.saving():
    raise error("a bug")


def test_the_lowest_loss_is_best(tmp_path):
  with saved(tmp_path, [3.0, 1.0, 2.0, 1.0], "loss") as manager:
    for which, steps in (("best", [20]), ("best:3", [30, 40, 20])):
      assert select.choose(manager, which, ranked_by("loss")) == steps
    assert manager.best_step() == 20


@pytest.mark.parametrize("which", INVALID)
def test_an_invalid_checkpoint_name_is_refused(which, many):
  with pytest.raises(UserError) as caught:
    select.choose(many, which, ranked_by("bleu"))
  message = str(caught.value)
  names = "must be last, best, last:N, best:N or a step"
  reason = f"not in {many.folder}" if which in ("35", "0") else names
  assert f"--checkpoint={which}: {reason}; saved steps" in message
  assert message.endswith("; saved steps: 10, 20, 30, 40, 50, 60")
  assert len(message.splitlines()) == 1


def test_every_name_is_refused_without_checkpoints(tmp_path):
  with saved(tmp_path) as manager:
    for which in ("last", "best", "last:1"):
      with pytest.raises(UserError, match="saved steps: none"):
        select.choose(manager, which, ranked_by("bleu"))


def test_checkpoints_without_metrics_are_never_best(tmp_path):
  with (
    saved(tmp_path, [None, None]) as manager,
    pytest.raises(
      UserError, match=r"--checkpoint=best: not in .*; saved steps: 10, 20"
    ),
  ):
    select.choose(manager, "best", ranked_by("bleu"))


@pytest.mark.parametrize(
  ("which", "steps", "used"),
  [
    ("last", [60], "step 60"),
    ("30", [30], "step 30"),
    ("last:3", [40, 50, 60], "mean of 3 steps, 40 to 60"),
    ("best:4", [10, 20, 40, 50], "mean of 4 steps, 10 to 50"),
  ],
)
def test_parameters_of_several_checkpoints_are_averaged(
  which, steps, used, many
):
  params, description = read.parameters(
    many, which, state_at(1), ranked_by("bleu")
  )
  assert description == used
  for name, leaf in params.items():
    expected = np.mean([state_at(step).params[name] for step in steps], axis=0)
    np.testing.assert_allclose(leaf, expected, rtol=1e-6)
    assert leaf.dtype == jnp.float32


def test_the_moving_average_is_saved_and_replaces_the_parameters(tmp_path):
  like = state_at(1, averaged=True)
  with saved(tmp_path, [1.0, 2.0], averaged=True) as manager:
    state, _ = read.restore(manager, 20, like)
    config = ranked_by("bleu")
    last, _ = read.parameters(manager, "last", like, config)
    mean, _ = read.parameters(manager, "last:2", like, config)
  expected = state_at(20, averaged=True)
  for name, leaf in expected.average.items():
    np.testing.assert_array_equal(state.params[name], expected.params[name])
    np.testing.assert_array_equal(state.average[name], leaf)
    np.testing.assert_array_equal(last[name], leaf)
    both = leaf + state_at(10, averaged=True).average[name]
    np.testing.assert_allclose(mean[name], both / 2, rtol=1e-6)


def test_a_state_without_a_moving_average_is_restored(many):
  state, position = read.restore(many, 20, state_at(1))
  assert state.average is None
  assert state.evaluated is state.params
  assert position == {"next_index": 2}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
  """A run with one checkpoint, of step 10."""
  folder = tmp_path_factory.mktemp("one")
  with saved(folder, [1.0]):
    pass
  return folder


@pytest.fixture
def copied(one, tmp_path):
  shutil.copytree(one, tmp_path / "run")
  return tmp_path / "run"


def restored(run):
  config = ranked_by("bleu")
  with opened(run, config, read_only=True) as manager:
    return read.restore(manager, 10, state_at(10))


@pytest.mark.parametrize(
  "count", [1, pytest.param(8, marks=pytest.mark.exhaustive)]
)
def test_a_changed_byte_is_detected_or_has_no_effect(count, copied):
  rng, detected = np.random.default_rng(0), 0
  whole = content.array_digests(content.arrays(state_at(10)))
  folder = copied / "checkpoints" / "10"
  files = sorted(path for path in folder.rglob("*") if path.stat().st_size)
  for path in filter(pathlib.Path.is_file, files):
    original = path.read_bytes()
    for place in rng.integers(len(original), size=count):
      changed = bytearray(original)
      changed[place] ^= 1 << rng.integers(8)
      path.write_bytes(changed)
      try:
        state, batches = restored(copied)
        assert batches == {"next_index": 1}
        assert content.array_digests(content.arrays(state)) == whole
      except UserError:
        detected += 1
      path.write_bytes(original)
  assert detected > 5 * count


def remove(path):
  path.unlink()


def cut(path):
  path.write_bytes(path.read_bytes()[:40])


def empty_json(path):
  path.write_text("{}")


@pytest.mark.parametrize(
  ("name", "damage", "message"),
  [
    ("digests/metadata", remove, "FileNotFoundError"),
    ("digests/metadata", empty_json, "is not what was saved"),
    ("state/_METADATA", cut, "JSONDecodeError"),
    ("state/manifest.ocdbt", cut, "DATA_LOSS"),
  ],
)
def test_damage_is_reported_with_its_cause(name, damage, message, copied):
  damage(copied / "checkpoints" / "10" / name)
  with pytest.raises(DamagedCheckpointError, match=message) as caught:
    restored(copied)
  assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
  "error",
  [
    PermissionError(13, "Permission denied", "state/manifest.ocdbt"),
    ValueError("Error reading x: [EIO: Input/output error]"),
  ],
)
def test_a_read_error_of_the_disk_is_not_reported_as_damage(
  error, one, monkeypatch
):
  monkeypatch.setattr(ocp.CheckpointManager, "restore", raises(error))
  with pytest.raises(UserError, match="10: cannot be read") as caught:
    restored(one)
  assert not isinstance(caught.value, DamagedCheckpointError)
  assert caught.value.__cause__ is error


def test_a_bug_is_not_reported_as_damage(one, monkeypatch):
  error = TypeError("a bug")
  monkeypatch.setattr(content.jax.random, "key_data", raises(error))
  with pytest.raises(TypeError, match="a bug"):
    restored(one)


def raises(error):
  def function(*_, **__):
    raise error

  return function


@pytest.mark.parametrize("library", ["numpy", "jax"])
def test_a_digest_depends_on_every_element_and_not_on_the_sharding(
  library, monkeypatch
):
  if library == "jax":
    monkeypatch.setattr(content, "_MAX_FOR_NUMPY", 0)
  array = jax.random.normal(jax.random.key(0), (8, 4))
  digest = content.array_digests(array)
  for index in np.ndindex(array.shape):
    changed = array.at[index].set(jnp.nextafter(array[index], jnp.inf))
    assert content.array_digests(changed) != digest
  assert content.array_digests(array[::-1]) != digest
  mesh = jax.make_mesh((8,), ("x",))
  shared = jax.device_put(array, jax.NamedSharding(mesh, jax.P("x")))
  assert content.array_digests(shared) == digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint32"])
def test_numpy_and_jax_compute_the_same_digest(dtype, monkeypatch):
  tree = {"a": jnp.arange(24).reshape(2, 3, 4).astype(dtype), "b": jnp.ones(())}
  digest = content.array_digests(tree)
  monkeypatch.setattr(content, "_MAX_FOR_NUMPY", 0)
  assert content.array_digests(tree) == digest
