"""Steps on meshes of several devices, and the randomness of a step."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot import hlo
from experiments.config import MeshConfig, TrainConfig
from experiments.distributed import mesh, sharding
from experiments.errors import UserError
from experiments.models.layers.affine import Affine
from experiments.optimization import losses
from tests.experiments.optimization.steps import (
  EIGHT,
  ONE,
  assert_same_state,
  build,
  train,
)
from tests.matrix import sampled

LAYOUTS = {
  "one": ONE,
  "data": EIGHT,
  "fsdp": {"data": 1, "fsdp": 8},
  "rows": {"data": 2, "fsdp": 4},
  "sequence": {"data": 1, "sequence": 8},
  "tensor": {"data": 1, "tensor": 2},
  "all": {"data": 1, "fsdp": 2, "sequence": 2, "tensor": 2},
}
REGULARIZED = {"model": {"dropout_rate": 0.1}, "label_smoothing": 0.1}


@functools.cache
def trained(arg, layout):
  settings = dict(REGULARIZED)
  if arg == "none":  # compiles less
    settings["model"] = {"bidirectional": False, **REGULARIZED["model"]}
  return train(build(arg, LAYOUTS[layout], **settings))


@sampled(
  ("arg", "layout"),
  [
    ("none", "rows"),
    ("additive", "rows"),
    ("transformer", "all"),
    ("additive", "data"),
    *(
      ("transformer", name)
      for name in ("data", "fsdp", "rows", "sequence", "tensor")
    ),
  ],
  default=[("none", "rows")],
)
def test_every_layout_trains_as_one_device(arg, layout):
  one, state_of_one = trained(arg, "one")
  eight, state_of_eight = trained(arg, layout)
  np.testing.assert_allclose(one, eight, rtol=1e-5)
  assert_same_state(state_of_one, state_of_eight, atol=1e-5)


@functools.cache
def trained_in_loops(layout):
  layers = {"encoder_layers": 1, "decoder_layers": 2, "scan_layers": True}
  model = {**layers, "remat": layout != "fsdp", "dropout_rate": 0.1}
  return train(build("transformer", LAYOUTS[layout], model))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  "layout", ["fsdp", "all", "data", "sequence", "tensor"]
)
def test_every_layout_trains_loops_over_layers_as_one_device(layout):
  one, state_of_one = trained_in_loops("one")
  eight, state_of_eight = trained_in_loops(layout)
  np.testing.assert_allclose(one, eight, rtol=1e-5)
  assert_same_state(state_of_one, state_of_eight, atol=1e-5)


@pytest.mark.exhaustive
def test_loops_gather_the_parameters_of_one_layer_at_a_time():
  layers = {"encoder_layers": 3, "decoder_layers": 3, "scan_layers": True}
  experiment = build("transformer", LAYOUTS["fsdp"], layers)
  state = experiment.abstract_state
  batch = mesh.shard_batch(experiment.training_batches()[0], experiment.mesh)
  with jax.set_mesh(experiment.mesh):
    lowered = experiment.jitted_step(state).lower(state, batch)
  text = lowered.compile().as_text()
  gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", text)
  assert "8,2,4" in gathered  # a projection to queries, keys or values
  assert not any(shape.startswith("3,") for shape in gathered)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("field", "value", "layout"),
  [
    ("normalizer", "softmax_sink", "all"),
    ("normalizer", "sigmoid", "all"),
    ("score", "local_p", "all"),
    ("score", "forgetting", "tensor"),
  ],
)
def test_scores_and_normalizers_of_sharded_heads(field, value, layout):
  model = {field: value, **({"window": 1} if value == "local_p" else {})}
  one, state_of_one = train(build("transformer", ONE, model))
  sharded, state = train(build("transformer", LAYOUTS[layout], model))
  np.testing.assert_allclose(one, sharded, rtol=1e-5)
  assert_same_state(state_of_one, state, atol=1e-5)


@pytest.mark.exhaustive
def test_a_step_keeps_the_sharding_of_the_state():
  state = build("transformer", LAYOUTS["all"], **REGULARIZED).initial_state()
  _, after = trained("transformer", "all")
  assert shard_shapes(state) == shard_shapes(after)
  kernel = "decoder_0/cross_attention/key_projection/kernel"
  for tree in ("params", "opt_state/1/0/trace"):
    assert shard_shapes(state)[f"{tree}/{kernel}"] == (8 // 2, 2 // 2, 4)
  assert shard_shapes(state)["params/decoder_norm/scale"] == (8,)


def shard_shapes(state):
  """By path, of one device."""
  return {
    sharding.path_name(path): (leaf.addressable_shards[0].data.shape)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state)
  }


@pytest.mark.exhaustive
def test_data_mesh_shards_batches_and_replicates_parameters():
  experiment = build(mesh=EIGHT)
  batch = mesh.shard_batch(experiment.training_batches()[0], experiment.mesh)
  assert {shard.data.shape[0] for shard in batch.source.addressable_shards} == {
    2
  }
  leaf = jax.tree.leaves(experiment.initial_state().params)[0]
  assert {shard.data.shape for shard in leaf.addressable_shards} == {leaf.shape}


@pytest.mark.exhaustive
def test_dropout_depends_on_the_step_and_the_seed_only():
  experiment = build("additive", **REGULARIZED)  # as in `trained`
  step = experiment.train_step(experiment.initial_state())
  batch = mesh.shard_batch(experiment.training_batches()[0], experiment.mesh)

  def loss(index):
    state = experiment.initial_state()
    state = dataclasses.replace(state, step=state.step + index)
    return float(step(state, batch)[1]["loss"])

  assert loss(0) == loss(0)
  assert loss(0) != loss(1)


def test_a_batch_that_does_not_divide_over_devices_is_refused():
  experiment = build(mesh=EIGHT)
  with pytest.raises(UserError, match="do not divide over 8 devices"):
    mesh.check_batch(experiment.mesh, TrainConfig(batch_size=20))
  config = TrainConfig(batch_size=16, accumulation=4)
  with pytest.raises(UserError, match="multiple of 32"):
    mesh.check_batch(experiment.mesh, config)


def test_the_readout_is_gathered_once_for_all_chunks_of_the_loss(monkeypatch):
  monkeypatch.setattr(losses, "_CHUNK_NUMBERS", 1)
  devices = mesh.make_mesh(MeshConfig(**LAYOUTS["fsdp"]))

  def sharded(*shape, spec, dtype=jnp.float32):
    sharding = NamedSharding(devices, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  features = sharded(8 * 64, 8, 16, spec=(mesh.ROWS,))
  labels = sharded(8 * 64, 8, spec=(mesh.ROWS,), dtype=jnp.int32)
  kernel = sharded(16, 512, spec=("fsdp",))

  def loss(features, kernel, labels):
    readout = Affine(kernel, None)
    return losses.sharded_cross_entropy(features, readout, labels)[0]

  with jax.set_mesh(devices):
    step = jax.jit(jax.grad(loss, (0, 1)))
    program = step.lower(features, kernel, labels).compile()
  executed = [
    (instruction.opcode, times)
    for _, instruction, times in hlo.parse(program.as_text()).executed()
  ]
  assert max(times for _, times in executed) > 1  # a loop over chunks
  gathers = [times for opcode, times in executed if opcode == "all-gather"]
  assert gathers == [1]
