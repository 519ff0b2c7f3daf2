"""The optimizer and its learning-rate schedule, from the config."""

import jax
import jax.numpy as jnp
import optax

from experiments.config import OptimizerConfig
from experiments.distributed.sharding import path_name


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
  """Makes a learning-rate schedule: a linear warm-up, then a decay."""
  warmup, peak = config.warmup_steps, config.learning_rate
  rest = max(num_steps - warmup, 1)
  decay = {
    "constant": lambda: optax.constant_schedule(peak),
    # Loshchilov and Hutter, 2016, equation 5 (https://arxiv.org/abs/1608.03983).
    "cosine": lambda: optax.cosine_decay_schedule(peak, rest),
    "linear": lambda: optax.linear_schedule(peak, 0.0, rest),
    # Vaswani et al., 2017, equation 3 (https://arxiv.org/abs/1706.03762).
    "inverse_sqrt": lambda: _inverse_sqrt_schedule(peak, max(warmup, 1)),
  }[config.schedule]()
  rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
  return optax.join_schedules([rise, decay], [warmup])


def _inverse_sqrt_schedule(peak: float, warmup: int) -> optax.Schedule:
  return lambda since: (
    peak * jnp.sqrt(warmup / (warmup + jnp.maximum(since, 0)))
  )


def _decay_mask(params):
  """Selects the parameters that decay: matrices, but not biases and norms."""
  # Biases of heads, [H, D / H], have two axes too, so they are found by name.
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf.ndim > 1 and not path_name(path).endswith("bias"),
    params,
  )


def make_optimizer(
  config: OptimizerConfig, num_steps: int
) -> optax.GradientTransformation:
  """Makes the optimizer: gradient clipping, then the update rule.

  See Kingma and Ba, 2014 (https://arxiv.org/abs/1412.6980), for adam,
  Loshchilov and Hutter, 2017 (https://arxiv.org/abs/1711.05101), for adamw,
  Shazeer and Stern, 2018 (https://arxiv.org/abs/1804.04235), for adafactor, and
  Pascanu et al., 2012 (https://arxiv.org/abs/1211.5063), for the clipping.

  Example:
    >>> optimizer = make_optimizer(OptimizerConfig(), num_steps=9)
    >>> state = optimizer.init({"w": jnp.ones(2)})
  """
  schedule = make_schedule(config, num_steps)
  rule = {
    "sgd": lambda: optax.sgd(schedule, momentum=config.b1 or None),
    "adam": lambda: optax.adam(schedule, config.b1, config.b2, config.eps),
    "adamw": lambda: optax.adamw(
      schedule,
      config.b1,
      config.b2,
      config.eps,
      weight_decay=config.weight_decay,
      mask=None if config.weight_decay_of == "all" else _decay_mask,
    ),
    "adafactor": lambda: optax.adafactor(schedule),
  }[config.name]()
  if config.clip_norm is None:
    return rule
  return optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)
