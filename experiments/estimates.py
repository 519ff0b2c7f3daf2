"""Which layouts keep how many accelerators busy: products against links."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import AbstractMesh

from experiments import costs
from experiments.accelerators import Accelerator, bandwidth
from experiments.mesh import AXES
from experiments.schema import ModelConfig

# Devices of a machine that share parameters, tokens or heads.
_FEW = 8


class Estimate(NamedTuple):
  """What a layout comes to.

  Attributes:
    compute: seconds of products.
    traffic: seconds of sending, by axis.
    state: bytes a device holds between updates.
    fewest_tokens: of an update, from which on sending takes no longer than
      computing; infinite if there is no such number.
  """

  compute: float
  traffic: dict[str, float]
  state: float
  fewest_tokens: float

  @property
  def busy(self) -> tuple[float, float]:
    """The share of time spent computing: nothing hidden, all hidden."""
    sending = sum(self.traffic.values())
    worst = self.compute / (self.compute + sending)
    return worst, min(1.0, self.compute / sending) if sending else 1.0


def layouts(devices: int, model: ModelConfig) -> list[dict[str, int]]:
  """Returns the layouts to compare for a number of devices.

  Args:
    devices: how many.
    model: `config.model`, typed.

  Returns:
    Sizes of axes, those of one left out.

  Example:
    >>> from configs import base
    >>> from experiments.schema import parse
    >>> layouts(64, parse(base.get_config().to_dict()).model)
    [{'data': 64}, {'fsdp': 64}, {'data': 8, 'fsdp': 8}]
  """
  few = math.gcd(devices, _FEW)
  found = [{"data": devices}, {"fsdp": devices}]
  found.append({"data": devices // few, "fsdp": few})
  if model.name == "transformer":
    heads = math.gcd(few, model.num_heads)
    found.append({"fsdp": devices // few, "sequence": few})
    found.append({"fsdp": devices // heads, "tensor": heads})
  found = [{name: n for name, n in axes.items() if n > 1} for axes in found]
  return [axes for i, axes in enumerate(found) if axes not in found[:i]]


def estimate(
  update: costs.Update,
  axes: dict[str, int],
  accelerator: Accelerator,
  *,
  num_rows: float,
  share: float,
) -> Estimate:
  """Returns what a layout comes to.

  Args:
    update: from `costs.update_of`.
    axes: sizes of axes of the mesh.
    accelerator: of `experiments.accelerators`.
    num_rows: of an update.
    share: of its peak that a device reaches.

  Returns:
    Times and sizes.

  Example:
    >>> from configs import base
    >>> from experiments.accelerators import accelerator
    >>> from experiments.schema import parse
    >>> config = parse(base.get_config("transformer").to_dict())
    >>> update, gpu = costs.update_of(config, 16), accelerator("h100")
    >>> found = estimate(update, {"data": 8}, gpu, num_rows=1e4, share=0.5)
    >>> f"{1e3 * found.compute:.2f} ms, {1e3 * found.traffic['data']:.2f} ms"
    '0.33 ms, 0.01 ms'
  """
  sizes = [axes.get(name, 1) for name in AXES]
  mesh = AbstractMesh(tuple(sizes), AXES)
  speeds = {
    name: bandwidth(
      accelerator, n, math.prod(sizes[place + 1 :]), ring=name == "sequence"
    )
    for place, (name, n) in enumerate(zip(AXES, sizes))
  }
  peak = getattr(accelerator, update.config.train.dtype)

  def seconds(rows: float) -> tuple[float, dict[str, float]]:
    compute = rows * update.flops / (mesh.size * peak * share)
    sent = costs.traffic(update, mesh, rows)
    return compute, {name: sent[name] / speeds[name] for name in AXES}

  compute, sending = seconds(num_rows)
  # Both grow by the row; what is left is sent for any number of rows.
  fixed = sum(seconds(0)[1].values())
  one_more, by_row = seconds(1)
  gained = one_more - (sum(by_row.values()) - fixed)
  rows = fixed / gained if gained > 0 else math.inf
  rows = max(rows, axes.get("data", 1) * axes.get("fsdp", 1))
  return Estimate(
    compute,
    {name: each for name, each in sending.items() if each},
    costs.state_bytes(update, mesh),
    2 * update.length * rows,
  )


def assumptions(
  update: costs.Update,
  accelerator: Accelerator,
  *,
  num_rows: float,
  share: float,
) -> list[str]:
  """Returns what a table is computed from.

  Args:
    update: from `costs.update_of`.
    accelerator: of `experiments.accelerators`.
    num_rows: of an update.
    share: of its peak that a device reaches.

  Returns:
    Lines.

  Example:
    >>> from configs import base
    >>> from experiments.accelerators import accelerator
    >>> from experiments.schema import parse
    >>> config = parse(base.get_config("transformer").to_dict())
    >>> update, gpu = costs.update_of(config, 16), accelerator("h100")
    >>> print(assumptions(update, gpu, num_rows=1e4, share=0.5)[0][:58], "...")
    0.7 M parameters, 2.06 MFLOP a token, 320.0 k tokens ...
  """
  length, dtype = update.length, update.config.train.dtype
  return [
    f"{update.num_parameters / 1e6:,.1f} M parameters,"
    f" {update.flops / (2 * length) / 1e6:,.2f} MFLOP a token,"
    f" {count(2 * length * num_rows)} tokens an update,"
    f" {length} + {length} a row",
    f"{accelerator.name}: {share:.0%} of"
    f" {getattr(accelerator, dtype) / 1e12:.0f} TFLOP/s ({dtype}),"
    f" {accelerator.memory / 1e9:.0f} GB, {accelerator.near / 1e9:.0f} GB/s"
    f" between {accelerator.domain:,}, {accelerator.far / 1e9:g} GB/s beyond"
    f" ({accelerator.source})",
  ]


def table(
  update: costs.Update,
  accelerator: Accelerator,
  devices: Sequence[int],
  *,
  num_rows: float,
  share: float,
) -> list[str]:
  """Returns the table, a line for each layout.

  Args:
    update: from `costs.update_of`.
    accelerator: of `experiments.accelerators`.
    devices: numbers of devices.
    num_rows: of an update.
    share: of its peak that a device reaches.

  Returns:
    Lines of Markdown.

  Example:
    >>> from configs import base
    >>> from experiments.accelerators import accelerator
    >>> from experiments.schema import parse
    >>> config = parse(base.get_config("transformer").to_dict())
    >>> update, gpu = costs.update_of(config, 16), accelerator("h100")
    >>> print(table(update, gpu, [8], num_rows=1e4, share=0.5)[2])
    | 8 | data 8 | 0.01 | 0.334 | 0.0106 | 97 to 100% | 10.2 k |
  """
  found = [
    "| devices | layout | state, GB | computing, ms | sending, ms | busy |"
    " compute-bound from |",
    "|---|---|---|---|---|---|---|",
  ]
  for size in devices:
    for axes in layouts(size, update.config.model):
      each = estimate(update, axes, accelerator, num_rows=num_rows, share=share)
      state = f"{each.state / 1e9:.2f}"
      if each.state > accelerator.memory:
        state += ", too much"
      worst, best = each.busy
      busy = f"{100 * worst:.0f} to {best:.0%}"
      if num_rows < axes.get("data", 1) * axes.get("fsdp", 1):
        busy = "too few rows"
      cells = (
        f"{size:,}",
        ", ".join(f"{name} {n}" for name, n in axes.items()),
        state,
        _three(1e3 * each.compute),
        _three(1e3 * sum(each.traffic.values())),
        busy,
        count(each.fewest_tokens),
      )
      found.append(f"| {' | '.join(cells)} |")
  return found


def count(number: float) -> str:
  """Returns a number of things in few characters.

  Args:
    number: of things; infinite for what is never reached.

  Returns:
    The number, rounded.

  Example:
    >>> count(4096), count(float("inf"))
    ('4.1 k', 'never')
  """
  if math.isinf(number):
    return "never"
  for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
    if number >= size:
      return f"{number / size:.1f}{letter}"
  return f"{number:.0f}"


def _three(number: float) -> str:
  """Three digits, or all before the point."""
  return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
