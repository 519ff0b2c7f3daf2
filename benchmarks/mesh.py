"""What sharing, saving and starting again cost.

    python -m benchmarks.mesh [--only=ring,step,save,restart] [--data=DIR]

- ring: temporaries of attention over 32,768 tokens, on one device and on each
  of eight simulated ones, as XLA plans them; the time of 8,192 tokens, on the
  same cores; and the largest error of a head, at 32,768 tokens.
- step: a training step of configs/multi30k.py's Transformer on a mesh of one
  device, against the same step without a mesh.
- save: what an asynchronous save takes of the steps, at 100 million parameters.
- restart: from the command to the first step after a checkpoint, of
  configs/multi30k.py (needs --data) with compiled code in the cache.

Each is a process of its own.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from absl import app, flags

_ONLY = flags.DEFINE_list(
  "only", ["ring", "step", "save", "restart"], "What to measure."
)
_DATA = flags.DEFINE_string("data", None, "The folder of Multi30k.")
_PART = flags.DEFINE_string("part", None, "Used by this program itself.")
_LENGTH, _TIMED, _DEVICES = 32_768, 8_192, 8


def ring() -> dict[str, dict[str, float]]:
  """MiB of temporaries a device, time and error, by case, on all devices."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from attention import attend, masks, ring_attention
  from attention.ring import arrange, restore

  count = jax.device_count()
  mesh = jax.make_mesh(
    (count,), ("s",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  share = jax.P(None, None, "s")
  place = jax.NamedSharding(mesh, share)

  def compiled(function, length):
    shape = (1, 8, length, 64)
    tokens = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
    return jax.jit(function).lower(tokens, tokens, tokens).compile()

  def tokens(heads, length):
    shape = (3, 1, heads, length, 64)
    return list(jax.random.normal(jax.random.key(0), shape))

  def largest_error(run, alone):
    given = tokens(1, _LENGTH)
    laid = [arrange(each, count, axis=-2) for each in given]
    got = jax.tree.leaves(jax.jit(run)(*jax.device_put(laid, place)))
    want = jax.device_get(jax.tree.leaves(jax.jit(alone)(*given)))
    return max(
      float(np.max(np.abs(restore(a, count, axis=-2) - b)))
      for a, b in zip(got, want)
    )

  found: dict[str, dict[str, float]] = {}
  for name, mask in (("full", None), ("causal", masks.causal())):

    def look(query, key, value, mask=mask):
      return ring_attention(query, key, value, axis_name="s", mask=mask)

    around = jax.shard_map(look, mesh=mesh, in_specs=share, out_specs=share)

    def alone(query, key, value, mask=mask):
      return attend(query, key, value, mask=mask)

    run = around if count > 1 else alone
    for what, made in (("forward", lambda f: f), ("gradient", _gradient)):
      memory: Any = compiled(made(run), _LENGTH).memory_analysis()
      timed = compiled(made(run), _TIMED)
      arguments = jax.device_put(tokens(8, _TIMED), place)
      case = found[f"{name} {what}"] = {
        "MiB": memory.temp_size_in_bytes / 2**20,
        "ms": _milliseconds(timed, arguments),
      }
      if count > 1:
        case["error"] = largest_error(made(run), made(alone))
  return found


def _gradient(function):
  """The gradients by all arguments of a sum that no term drops out of."""
  import jax
  import jax.numpy as jnp

  return jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1, 2))


def _milliseconds(function, arguments) -> float:
  """The median of five calls after one."""
  import jax

  times = []
  for _ in range(6):
    begin = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    times.append(1e3 * (time.perf_counter() - begin))
  return statistics.median(times[1:])


def step_overhead() -> dict[str, float]:
  """Milliseconds of a step, with a mesh of one device and without any."""
  import jax

  cases = _steps()
  times: dict[str, list[float]] = {name: [] for name in cases}
  states = {name: state for name, (_, _, state) in cases.items()}
  for turn in range(24):
    for name in sorted(cases, reverse=bool(turn % 2)):
      step, place, _ = cases[name]
      begin = time.perf_counter()
      states[name], metrics = step(states[name], place())
      jax.block_until_ready((states[name], metrics))
      if turn >= 4:
        times[name].append(1e3 * (time.perf_counter() - begin))
  ratios = [mesh / plain for mesh, plain in zip(times["mesh"], times["plain"])]
  return {
    "mesh": statistics.median(times["mesh"]),
    "plain": statistics.median(times["plain"]),
    "ratio": statistics.median(ratios),
  }


def _steps() -> dict[str, Any]:
  """Of each case the step, what places its batch, and a state."""
  import jax
  import numpy as np

  from configs import multi30k
  from experiments import mesh, runs, schema, steps
  from experiments.data.batch import Batch
  from experiments.models import make_model
  from experiments.optimizer import make_optimizer

  config = schema.parse(multi30k.get_config().to_dict())
  model = make_model(
    config.model,
    source_vocabulary_size=8000,
    target_vocabulary_size=8000,
    shared_vocabulary=True,
    max_length=64,
    dtype="float32",
  )
  optimizer = make_optimizer(config.optimizer, 100)
  one = mesh.make_mesh(schema.MeshConfig.one())
  run = runs.Run(config, one, None, model, optimizer)  # type: ignore[arg-type]
  state = runs.start(run)
  rng = np.random.default_rng(0)
  batch = Batch(*rng.integers(4, 8000, (2, 256, 16), np.int32))
  plain = steps.make_train_step(
    model, optimizer, label_smoothing=config.train.label_smoothing
  )
  return {
    "mesh": (
      runs.make_step(run, state),
      lambda: mesh.place_rows(batch, one),
      state,
    ),
    "plain": (
      jax.jit(plain, donate_argnums=0),
      lambda: jax.device_put(batch),
      jax.tree.map(lambda leaf: leaf.copy(), state),
    ),
  }


def save_share() -> dict[str, float]:
  """Seconds of steps, alone and with a save in the first of a hundred."""
  import jax
  import jax.numpy as jnp

  from experiments import checkpoints
  from experiments.steps import TrainState

  side = 2048
  params = {f"w{i}": jnp.ones((side, side)) for i in range(24)}
  weights = sum(leaf.size for leaf in params.values())
  state = TrainState(
    step=jnp.int32(0),
    params=params,
    opt_state=(params, params),
    rng=jax.random.key(0),
    average=None,
  )

  @jax.jit
  def step(state, x):
    """Some 0.2 TFLOP: what 100 million parameters take of few tokens."""
    for leaf in state.params.values():
      x = jnp.tanh(x @ leaf)
    return state.replace(step=state.step + 1), x

  x = jnp.ones((1024, side))
  times: dict[str, list[float]] = {"alone": [], "saving": []}
  calls = []
  with (
    tempfile.TemporaryDirectory() as folder,
    checkpoints.opened(Path(folder), keep_last=1) as manager,
  ):
    for number in range(30):
      name = "saving" if number >= 10 else "alone"
      begin = time.perf_counter()
      state, x = step(state, x)
      jax.block_until_ready(x)
      if number == 10:
        called = time.perf_counter()
        checkpoints.save(manager, state, {"next_index": number}, None)
        calls.append(time.perf_counter() - called)
      if number > 1:
        times[name].append(time.perf_counter() - begin)
    begin = time.perf_counter()
    checkpoints.wait(manager)
    rest = time.perf_counter() - begin
  alone = statistics.median(times["alone"])
  extra = sum(times["saving"]) - alone * len(times["saving"])
  return {
    "parameters": weights,
    "step": alone,
    "call": calls[0],
    "extra of all steps after": extra,
    "left to write then": rest,
    "share of a hundred steps": max(extra + rest, 0.0) / (100 * alone),
  }


def restart(data: str) -> dict[str, float]:
  """Seconds from a command that resumes to its first step."""
  with tempfile.TemporaryDirectory() as folder:
    command = [
      sys.executable,
      "-m",
      "experiments.train",
      "--config=configs/multi30k.py",
      f"--config.data.dir={data}",
      f"--workdir={folder}/run",
      "--config.train.checkpoint_every=20",
      "--config.train.log_every=1",
    ]
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
    # Until every shape of a batch has been compiled; then three restarts.
    _until_step(command, env, Path(folder) / "run", 400)
    seconds = [
      _until_step(command, env, Path(folder) / "run", 20) for _ in range(3)
    ]
  return {"median": statistics.median(seconds), "worst": max(seconds)}


def _until_step(command, env, run: Path, num_steps: int) -> float:
  """Seconds to the first step; the run then goes on for so many."""

  def saved():
    names = (path.name for path in run.glob("checkpoints/[0-9]*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)

  def timed():
    path = run / "timings.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return any(
      json.loads(line).get("first_step_seconds")
      and json.loads(line)["step"] == last + 1
      for line in lines
      if line.endswith("}")
    )

  last, took = saved(), None
  begin = time.perf_counter()
  process = subprocess.Popen(
    command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
  )
  while process.poll() is None and saved() < last + num_steps:
    if took is None and timed():
      took = time.perf_counter() - begin
    time.sleep(0.02)
  process.kill()
  process.wait()
  assert took is not None, "training ended before its first step"
  return took


PARTS = {
  "ring": ring,
  "step": step_overhead,
  "save": save_share,
}


def part(name: str, devices: int = 1) -> dict[str, Any]:
  """Measures in a process that has so many devices."""
  flag = f"--xla_force_host_platform_device_count={devices}"
  done = subprocess.run(
    [sys.executable, "-m", "benchmarks.mesh", f"--part={name}"],
    env={**os.environ, "XLA_FLAGS": flag},
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    raise RuntimeError(done.stderr)
  return json.loads(done.stdout.splitlines()[-1])


def main(_) -> None:
  """Measures and prints."""
  if _PART.value:
    from experiments import runtime

    runtime.set_up_jax()
    print(json.dumps(PARTS[_PART.value]()))
    return
  if "ring" in _ONLY.value:
    alone, around = part("ring"), part("ring", _DEVICES)
    for unit, length in (("MiB", _LENGTH), ("ms", _TIMED)):
      print(f"attention over 1 x 8 x {length} x 64, {unit}")
      print(f"{'':<18}{'one device':>12}{'8 devices':>12}{'ratio':>8}")
      for name, case in around.items():
        one, each = alone[name][unit], case[unit]
        print(f"{name:<18}{one:>12,.1f}{each:>12,.1f}{each / one:>8.2f}")
    print(f"largest errors over 1 x 1 x {_LENGTH} x 64")
    for name, case in around.items():
      print(f"{name:<18}{case['error']:>12.1e}")
  for name in ("step", "save"):
    if name in _ONLY.value:
      print(name)
      for what, value in part(name).items():
        print(f"  {what:<26}{value:>14,.4g}")
  if "restart" in _ONLY.value:
    if not _DATA.value:
      print("restart: skipped; give --data=DIR, the folder of Multi30k")
      return
    for what, value in restart(_DATA.value).items():
      print(f"restart to first step, {what}: {value:.2f} s")


if __name__ == "__main__":
  app.run(main)
