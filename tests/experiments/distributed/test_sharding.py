"""Sharding rules, their description, and invalid meshes."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from configs import base
from experiments.config import MeshConfig, parse
from experiments.data.dataset import BatchShard
from experiments.distributed import mesh as mesh_lib
from experiments.distributed import sharding
from experiments.errors import UserError
from experiments.experiment import make_experiment
from experiments.models import make_model


def make_mesh(data=1, fsdp=1, sequence=1, tensor=1):
  return mesh_lib.make_mesh(
    MeshConfig(data=data, fsdp=fsdp, sequence=sequence, tensor=tensor)
  )


def abstract_state(tmp_path, arg, **mesh):
  config = base.get_config(arg)
  config.mesh.update(data=1)
  config.mesh.update(mesh)
  experiment = make_experiment(parse(config.to_dict()), tmp_path)
  return experiment.abstract_state, experiment.mesh


@dataclasses.dataclass(frozen=True)
class Chip:
  """A device of a TPU v6e, as JAX describes it."""

  id: int
  platform = "tpu"
  device_kind = "TPU v6 lite"
  core_on_chip = 0
  process_index = 0

  @property
  def coords(self):
    return [self.id % 4, self.id // 4, 0]


def test_an_axis_may_be_a_part_of_an_axis_of_the_physical_mesh():
  chips = [Chip(number) for number in range(16)]
  sizes = MeshConfig(data=2, fsdp=2, sequence=2, tensor=2)
  mesh = mesh_lib.make_mesh(sizes, chips)
  assert mesh.devices.shape == (2, 2, 2, 2)
  assert {*mesh.devices.flat} == {*chips}
  one, other = mesh.devices[0, 0, 0]
  distance = np.subtract(one.coords, other.coords)
  assert np.abs(distance).sum() == 1  # neighbours


@pytest.mark.parametrize("arg", ["transformer", "additive"])
def test_rules_shard_most_of_a_state(tmp_path, arg):
  state, _ = abstract_state(tmp_path, arg, fsdp=8)
  whole, share = numbers(state.params)
  assert share < whole / 8 * 1.3
  whole, share = numbers(state.opt_state)
  assert share < whole / 8 * 1.3


def numbers(tree):
  leaves = jax.tree.leaves(tree)
  shapes = [leaf.sharding.shard_shape(leaf.shape) for leaf in leaves]
  return sum(leaf.size for leaf in leaves), sum(map(np.prod, shapes))


def test_every_rule_matches_a_parameter(tmp_path):
  used = set()
  for arg in base.ARGUMENTS:
    state, _ = abstract_state(tmp_path, arg)
    for path, _ in jax.tree_util.tree_leaves_with_path(state.params):
      name = sharding.path_name(path)
      used.add(sharding._rule(name))
  config = base.get_config("transformer")
  config.model.update(score="additive", tied_embeddings=False)
  experiment = make_experiment(parse(config.to_dict()), tmp_path)
  params = experiment.abstract_state.params
  for path, _ in jax.tree_util.tree_leaves_with_path(params):
    name = sharding.path_name(path)
    used.add(sharding._rule(name))
  assert used == {rule for rule, _ in sharding.PARAMETERS}


def test_the_last_rule_matches_no_matrix(tmp_path):
  for tied in (True, False):
    config = base.get_config("transformer")
    config.model.tied_embeddings = tied
    config.data = base.numbers()  # two vocabularies
    typed = parse(config.to_dict())
    model = make_model(
      typed.model,
      source_vocabulary_size=9,
      target_vocabulary_size=7,
      shared_vocabulary=False,
      max_length=8,
      dtype="float32",
    )
    tokens = np.ones((1, 8), np.int32)
    init = functools.partial(model.init, jax.random.key(0), tokens, tokens)
    params = jax.eval_shape(init)["params"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
      name = sharding.path_name(path)
      if leaf.ndim > 1:
        assert sharding._rule(name) != ".*", name


def test_devices_that_the_axes_do_not_divide_are_refused():
  with pytest.raises(UserError, match="8 devices are no multiple of tensor 3"):
    make_mesh(data=-1, tensor=3)
  assert make_mesh(data=1, tensor=3).size == 3


def test_an_array_axis_that_does_not_divide_is_replicated():
  mesh = make_mesh(fsdp=2, tensor=4)
  layout = sharding.sharding_of("params/embedding/embedding", (53, 8), mesh)
  assert layout.shard_shape((53, 8)) == (53, 4)


def test_adafactor_sums_over_axes_are_replicated():
  mesh = make_mesh(fsdp=8)
  name = "opt_state/v_row/feed_forward/Dense_0/kernel"
  assert sharding.sharding_of(name, (64,), mesh).is_fully_replicated


def test_the_sizes_of_the_description_add_up(tmp_path):
  state, mesh = abstract_state(tmp_path, "transformer", fsdp=4, tensor=2)
  head, columns, *lines = sharding.describe(state, mesh)
  assert head == "8 devices: fsdp 4, tensor 2"
  assert columns.split() == ["axes", "MiB", "per", "device"]
  *parts, parameters, optimizer = lines
  sizes = [[float(x) for x in line.split()[-2:]] for line in parts]
  total = [float(x) for x in parameters.split()[-2:]]
  np.testing.assert_allclose(np.sum(sizes, 0), total, atol=0.05)
  whole, share = numbers(state.params)
  np.testing.assert_allclose(
    total, np.array([whole, share]) * 4 / 2**20, atol=0.01
  )
  assert optimizer.startswith("optimizer state")
  assert any("fsdp, tensor, -" in line for line in parts)


def test_the_description_for_one_device_is_one_line(tmp_path):
  state, mesh = abstract_state(tmp_path, "transformer")
  (line,) = sharding.describe(state, mesh)
  assert line == "parameters 2.6 MiB, optimizer state 5.1 MiB"


def test_a_batch_is_sharded_over_data_and_fsdp():
  mesh = make_mesh(data=2, fsdp=2, tensor=2)
  assert mesh_lib.num_batch_shards(mesh) == 4
  assert mesh_lib.batch_shard(mesh) == BatchShard((0, 1, 2, 3), 4)
  placed = mesh_lib.shard_batch(np.arange(8), mesh)
  np.testing.assert_array_equal(placed, np.arange(8))
  assert {shard.data.shape for shard in placed.addressable_shards} == {(2,)}
  whole = mesh_lib.shard_rows(np.arange(8), mesh)
  assert {shard.data.shape for shard in whole.addressable_shards} == {(1,)}


def test_minus_one_takes_the_remaining_devices():
  assert make_mesh(data=-1, tensor=2).shape["data"] == jax.device_count() // 2


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ({"fsdp": 16}, r"mesh: fsdp=16 needs 16 devices, but this run has 8 \(cpu"),
    (
      {"data": 4, "tensor": 4},
      "config.mesh: data=4 x tensor=4 needs 16 devices",
    ),
  ],
)
def test_a_mesh_of_too_many_devices_is_refused(sizes, message):
  with pytest.raises(UserError, match=message):
    make_mesh(**sizes)


@pytest.mark.parametrize(
  ("arg", "mesh", "message"),
  [
    ("additive", {"sequence": 2}, r"sequence: 2, but a recurrent"),
    ("dot", {"tensor": 2}, r"mesh\.tensor: 2, but a recurrent"),
    ("transformer", {"tensor": 8}, "4 heads .* do not divide over 8 devices"),
  ],
)
def test_a_mesh_that_the_model_does_not_support_is_refused(
  tmp_path, arg, mesh, message
):
  with pytest.raises(UserError, match=message):
    abstract_state(tmp_path, arg, **mesh)


def test_rules_contain_only_axes_of_the_mesh():
  rules = itertools.chain(*(axes for _, axes in sharding.PARAMETERS))
  assert set(rules) - {None} <= set(mesh_lib.AXES)
