"""What an update costs on paper: its products, its traffic, its memory.

The traffic is that of the programs XLA compiles for `experiments.sharding`;
tests count it in them. Letters: n devices of an axis.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh

from experiments import sharding, steps
from experiments.data.batch import Batch
from experiments.models import make_model
from experiments.optimizer import make_optimizer
from experiments.schema import Config, TaskConfig, TransformerConfig
from experiments.steps import TrainState

# All-reduces of a [rows, tokens, model] array over the devices that share
# heads: in a layer's forward pass one a sublayer, in its backward pass one a
# projection that reads the residual stream.
_ENCODER_REDUCTIONS = 2 + 4
_DECODER_REDUCTIONS = 3 + 7
# Looking words up, source and target, and the loss's gradient by the features.
_VOCABULARY_REDUCTIONS = 3
# Arrays that travel around a ring: keys and values, forwards and backwards, and
# backwards their gradients, which are float32.
_TRAVELLERS, _GRADIENTS = 2 + 2, 2


class Update(NamedTuple):
  """An update of a config, apart from the devices that share it.

  Attributes:
    config: the typed config.
    state: shapes of the `TrainState`.
    length: tokens of every source, and of every target.
    flops: operations of matrix products a row, a row being a source and its
      target.
  """

  config: Config
  state: TrainState
  length: int
  flops: float

  @property
  def num_parameters(self) -> int:
    """The number of weights."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.params))

  @property
  def params(self) -> Any:
    """The shapes of the parameters."""
    return self.state.params


def update_of(config: Config, length: int) -> Update:
  """Traces an update of a config; nothing is computed and no data is read.

  Args:
    config: the typed config. The vocabulary is as large as it allows.
    length: tokens of every source, and of every target.

  Returns:
    What it costs.

  Example:
    >>> from configs import base
    >>> from experiments.schema import parse
    >>> config = parse(base.get_config("transformer").to_dict())
    >>> update = update_of(config, length=16)
    >>> update.num_parameters, round(update.flops / 1e6)
    (669824, 66)
  """
  data = config.data
  if isinstance(data, TaskConfig):
    from experiments.data.synthetic import Synthetic

    task = Synthetic(data)
    sizes = task.source_vocabulary_size, task.target_vocabulary_size
    shared = task.shared_vocabulary
  else:
    sizes = (
      data.source_tokenizer.vocabulary_size,
      data.target_tokenizer.vocabulary_size,
    )
    shared = data.joint_vocabulary
  model = make_model(
    config.model,
    source_vocabulary_size=sizes[0],
    target_vocabulary_size=sizes[1],
    shared_vocabulary=shared,
    max_length=length,
    dtype=config.train.dtype,
  )
  optimizer = make_optimizer(config.optimizer, config.train.steps)
  tokens = np.ones((1, length), np.int32)
  batch = Batch(tokens, tokens)
  averaged = config.train.ema_decay > 0
  state = jax.eval_shape(
    lambda: steps.init_state(model, optimizer, batch, 0, averaged=averaged)
  )
  step = steps.make_train_step(model, optimizer)
  program = jax.make_jaxpr(step)(state, batch)
  return Update(config, state, length, product_flops(program.jaxpr))


def product_flops(jaxpr) -> float:
  """Returns the floating-point operations of a program's matrix products.

  Args:
    jaxpr: the program; loops count as often as they run.

  Returns:
    Two for each multiplication and addition.

  Example:
    >>> product = jax.make_jaxpr(lambda x: x @ x)(np.ones((4, 4)))
    >>> product_flops(product.jaxpr)
    128.0
  """
  total = 0.0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      (contracted, _), _ = equation.params["dimension_numbers"]
      left = equation.invars[0].aval.shape
      inner = math.prod(left[axis] for axis in contracted)
      total += 2.0 * inner * math.prod(equation.outvars[0].aval.shape)
    repeats = equation.params.get("length", 1)
    for inside in jaxprs_in_params(equation.params):
      total += repeats * product_flops(inside)
  return total


def state_bytes(update: Update, mesh: AbstractMesh) -> float:
  """Returns what a device holds between updates.

  Args:
    update: from `update_of`.
    mesh: with the axes of `experiments.mesh`.

  Returns:
    Bytes of its share of parameters, optimizer state and average.

  Example:
    >>> from configs import base
    >>> from experiments.mesh import AXES
    >>> from experiments.schema import parse
    >>> config = parse(base.get_config("transformer").to_dict())
    >>> update = update_of(config, length=16)
    >>> whole, shared = (
    ...   state_bytes(update, AbstractMesh((1, size, 1, 1), AXES))
    ...   for size in (1, 8)
    ... )
    >>> round(whole / 2**20, 1), round(shared / whole, 2)
    (7.7, 0.14)
  """
  state = update.state
  arrays = (state.params, state.opt_state, state.average)
  layouts = sharding.layouts(arrays, mesh)
  return sum(
    math.prod(layout.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf, layout in zip(jax.tree.leaves(arrays), jax.tree.leaves(layouts))
  )


def traffic(
  update: Update, mesh: AbstractMesh, num_rows: float
) -> dict[str, float]:
  """Returns what a device sends along each axis of a mesh, for one update.

  Of rings: to sum an array of b bytes over n devices each sends 2 (n-1)/n b,
  to gather it (n-1)/n b. See "Bandwidth Optimal All-reduce Algorithms for
  Clusters of Workstations", Patarasuk and Yuan, 2009
  (https://doi.org/10.1016/j.jpdc.2008.09.002).

  Args:
    update: from `update_of`.
    mesh: with the axes of `experiments.mesh`.
    num_rows: of the whole batch.

  Returns:
    Bytes, by axis.

  Example:
    >>> from configs import base
    >>> from experiments.mesh import AXES
    >>> from experiments.schema import parse
    >>> config = parse(base.get_config("transformer").to_dict())
    >>> update = update_of(config, length=16)
    >>> mesh = AbstractMesh((8, 1, 1, 1), AXES)
    >>> round(traffic(update, mesh, 64)["data"] / 1e6, 1)
    4.8
  """
  passed = {name: (n - 1) / n for name, n in mesh.shape.items()}
  sent = dict.fromkeys(mesh.shape, 0.0)
  for path, leaf in jax.tree_util.tree_leaves_with_path(update.params):
    name = sharding.path_name(path)
    axes = sharding.layout_of(name, leaf.shape, mesh).spec
    uses = _gradients(update, name)
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    if "tensor" in axes:
      size /= mesh.shape["tensor"]
    # Gathered for the forward pass and kept for the backward pass.
    sent["fsdp"] += passed["fsdp"] * size * (2 * uses + ("fsdp" in axes))
    if "fsdp" in axes:
      size /= mesh.shape["fsdp"]
    for axis in ("data", "sequence"):
      sent[axis] += 2 * passed[axis] * size * uses
  model = update.config.model
  if isinstance(model, TransformerConfig):
    rows = num_rows / (mesh.shape["data"] * mesh.shape["fsdp"])
    width = 4 if update.config.train.dtype == "float32" else 2
    numbers = rows * update.length * model.model_size
    hidden = width * numbers / mesh.shape["sequence"]
    reductions = (
      model.encoder_layers * _ENCODER_REDUCTIONS
      + model.decoder_layers * _DECODER_REDUCTIONS
      + _VOCABULARY_REDUCTIONS
    )
    sent["tensor"] += 2 * passed["tensor"] * hidden * reductions
    if mesh.shape["sequence"] > 1:
      attentions = model.encoder_layers + 2 * model.decoder_layers
      each = (_TRAVELLERS * width + _GRADIENTS * 4) / mesh.shape["tensor"]
      sent["sequence"] += attentions * numbers * each
  return sent


def _gradients(update: Update, name: str) -> int:
  """As how many sums a parameter's gradient reaches the other devices.

  An embedding that is also the output has one for each use, and a score that
  a decoder meets token by token one for each token.
  """
  model = update.config.model
  if isinstance(model, TransformerConfig):
    alone = "source_embedding" in update.params
    is_shared = name == "embedding/embedding"
    return 1 + is_shared * (model.tied_embeddings + (not alone))
  looks = name.startswith("look/") and not name.endswith("/key_weight")
  return update.length if looks else 1
