"""Costs on paper: what they say is what the compiled programs do."""

import math
import re
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from configs import base
from experiments import accelerators, costs, estimates, mesh, runs, schema
from experiments.data.batch import Batch
from experiments.mesh import AXES
from tests.experiments.processes import run

ROWS, LENGTH = 32, 32
BYTES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1}
# What a device sends of what an operation returns, over n devices.
SENT = {
  "all-reduce": lambda n: 2 * (n - 1) / n,
  "all-gather": lambda n: (n - 1) / n,
  "all-to-all": lambda n: (n - 1) / n,
  "reduce-scatter": lambda n: n - 1.0,
  "collective-permute": lambda n: 1.0,
}


def config(arg="transformer", **sizes):
  config = base.get_config(arg)
  config.data.update(symbols=61, max_length=LENGTH - 1)
  config.train.batch_size = ROWS
  if arg == "transformer":
    config.model.update(
      model_size=64,
      feed_forward_size=128,
      num_heads=8,
      encoder_layers=1,
      decoder_layers=1,
    )
  config.mesh.update({"data": 1, **sizes})
  return schema.parse(config.to_dict())


def compiled(config):
  """The text of the program of an update."""
  run = runs.build(config, None)
  state = runs.abstract_state(run)
  layout = jax.NamedSharding(run.mesh, jax.P(mesh.ROWS))
  tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32, sharding=layout)
  with jax.set_mesh(run.mesh):
    lowered = runs.jitted_step(run, state).lower(state, Batch(tokens, tokens))
  return lowered.compile().as_text()


def bytes_sent(program, num_devices):
  """By kind, of the collectives of a program, loops as often as they run."""
  bodies, name = {}, ""
  for line in program.splitlines():
    if header := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
      name = "main" if header[1] else header[2]
      bodies[name] = []
    else:
      bodies.setdefault(name, []).append(line)
  found = Counter()

  def count(name, times):
    for line in bodies[name]:
      if loop := re.search(r"while\(.*body=%?([\w.-]+)", line):
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        count(loop[1], times * int(trips[1]))
      elif call := re.search(r" call\(.*to_apply=%?([\w.-]+)", line):
        count(call[1], times)
      elif made := re.search(rf"= (.*?) ({'|'.join(SENT)})(-start)?\(", line):
        size = sum(
          BYTES[dtype] * math.prod(int(n) for n in shape.split(",") if n)
          for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", made[1])
        )
        found[made[2]] += times * size * SENT[made[2]](num_devices)

  count("main", 1)
  return found


@pytest.mark.parametrize(
  ("arg", "axis"),
  [
    ("additive", "data"),
    ("transformer", "data"),
    ("transformer", "fsdp"),
    ("transformer", "tensor"),
    ("transformer", "sequence"),
  ],
)
def test_traffic_is_that_of_the_compiled_program(arg, axis):
  typed = config(arg, **{axis: 8})
  found = bytes_sent(compiled(typed), 8)
  sizes = tuple(8 if name == axis else 1 for name in AXES)
  update = costs.update_of(typed, LENGTH)
  sent = costs.traffic(update, AbstractMesh(sizes, AXES), ROWS)
  assert {name for name, size in sent.items() if size} == {axis}
  assert sent[axis] == pytest.approx(sum(found.values()), rel=0.1), found


def test_state_is_what_a_device_holds():
  typed = config(fsdp=2, tensor=4)
  state = runs.start(runs.build(typed, None))
  held = sum(
    leaf.addressable_shards[0].data.nbytes
    for leaf in jax.tree.leaves((state.params, state.opt_state))
  )
  update = costs.update_of(typed, LENGTH)
  assert costs.state_bytes(update, AbstractMesh((1, 2, 1, 4), AXES)) == held


def test_products_are_those_of_the_formulas():
  update = costs.update_of(config(), LENGTH)
  # Six for each weight that a token passes, embeddings aside: the rest are the
  # readout's and attention's.
  d, f, v, t = 64, 128, 64, LENGTH
  encoder = t * (4 * d * d + 2 * d * f)
  decoder = t * (8 * d * d + 2 * d * f + d * v)
  looks = 3 * 2 * t * t * d
  assert update.flops == pytest.approx(6 * (encoder + decoder + looks), rel=0.1)


def test_a_layout_is_compute_bound_from_the_tokens_it_says():
  update = costs.update_of(config(), LENGTH)
  gpu = accelerators.accelerator("h100")
  for axes in ({"data": 64}, {"fsdp": 512}, {"data": 8, "fsdp": 8}):
    few = estimates.estimate(update, axes, gpu, num_rows=1, share=0.5)
    rows = few.fewest_tokens / (2 * LENGTH)
    enough = estimates.estimate(update, axes, gpu, num_rows=rows, share=0.5)
    assert sum(enough.traffic.values()) == pytest.approx(enough.compute)
    assert enough.busy == (pytest.approx(0.5), pytest.approx(1))


def test_links_of_a_domain_are_filled_with_the_inner_axes_first():
  gpu = accelerators.accelerator("h100")
  assert accelerators.bandwidth(gpu, size=8, inner=1) == gpu.near
  assert accelerators.bandwidth(gpu, size=2, inner=8) == gpu.far
  assert accelerators.bandwidth(gpu, size=16, inner=2) == 4 * gpu.far
  assert accelerators.bandwidth(gpu, size=16, inner=2, ring=True) == gpu.far


def test_the_command_prints_a_table():
  args = ("plan", "--config=configs/reverse.py:transformer")
  code, out, error = run(*args, "--devices=8,64", "--accelerator=v5p")
  assert code == 0, error
  assert "| 8 | data 8 |" in out
  assert "| 64 | fsdp 8, sequence 8 |" in out
  assert "v5p: 50% of 459 TFLOP/s" in out


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--accelerator=abacus", "known: a100, h100, h200, v5e, v5p"),
    ("--devices=8,many", "--devices: got 'many'; give whole numbers"),
  ],
)
def test_bad_flags_are_one_message(flag, message):
  code, _, error = run("plan", "--config=configs/reverse.py", flag)
  assert code == 2
  assert message in error
  assert "Traceback" not in error
