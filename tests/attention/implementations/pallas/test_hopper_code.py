"""The machine code of the kernel for Hopper GPUs, compiled and not run."""

import collections
import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from attention import attend, masks, normalizers, scores
from attention.implementations import Pallas
from benchmarks.accelerators.attention_cases import SCORES, on_one_device
from benchmarks.attention.score_cases import manhattan
from experiments.aot import cost
from experiments.aot.targets import TARGETS
from experiments.errors import UserError

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/ +(?:@\S+ )?([A-Z][\w.]*)(.*)")


def loops(text):
  """The instructions of each loop, by name, innermost loops included."""
  names, rests, labels = [], [], {}
  for line in text.splitlines():
    if label := re.match(r"(\.L_x_\d+):", line):
      labels[label[1]] = len(names)
    elif instruction := _INSTRUCTION.search(line):
      names.append(instruction[1])
      rests.append(instruction[2])
  for number, (name, rest) in enumerate(zip(names, rests)):
    target = re.search(r"\.L_x_\d+", rest) if name == "BRA" else None
    start = labels.get(target[0], number + 1) if target else number + 1
    if start <= number:
      yield collections.Counter(names[start : number + 1])


def test_loops_are_found_in_machine_code():
  text = """
.L_x_1:
   1:-:-:Y:01        /*0010*/                   MUFU.TANH R1, R2
   1:-:-:Y:01        /*0020*/              @!P0 FADD R1, R2, R3
   1:-:-:Y:01        /*0030*/               @P1 BRA `(.L_x_1)
   1:-:-:Y:01        /*0040*/                   EXIT
"""
  assert list(loops(text)) == [{"MUFU.TANH": 1, "FADD": 1, "BRA": 1}]


def installed_target():
  """An H100, if its compiler is installed; else the test is skipped."""
  target = TARGETS["h100"]
  try:
    target.check_installed()
  except UserError as error:
    pytest.skip(str(error))
  return target


def compiled(case, folder):
  """Compiles a case, and writes the reports and the code of its kernels."""
  installed_target()
  dump = {
    "MOSAIC_GPU_DUMP_SASS": "1",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "MOSAIC_GPU_DUMP_TO": str(folder),
  }
  subprocess.run(
    [
      *(sys.executable, "-m", "benchmarks.accelerators", "--target=h100"),
      *(f"--only={case}", f"--json={folder}"),
    ],
    check=True,
    env={**os.environ, **dump, "XLA_FLAGS": ""},
  )


def dumped(monkeypatch, folder):
  """Writes the reports of the kernels that this process compiles."""
  monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
  monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))


def check_no_spills(folder, kernels):
  assert checked_reports(folder) == kernels


def checked_reports(folder):
  """Checks that no kernel spills; returns the number of reports."""
  reports = [*folder.glob("*.ptxas")]
  for report in reports:
    assert "0 bytes spill stores, 0 bytes spill loads" in report.read_text()
  return len(reports)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("case", "kernels"),
  [
    ("scaled_dot/causal", 3),
    ("soft_cap/causal", 3),
    ("qk_norm/padding", 4),
    ("cosine/causal", 4),
    ("general/causal", 4),
    ("general/alibi", 4),
    ("soft_cap/alibi", 3),
    ("additive/padding", 4),
    ("additive/alibi", 4),
    ("concat/window", 4),
    ("shaw/causal", 4),
    ("disentangled/none", 4),
    ("disentangled/causal", 4),
    ("disentangled/alibi", 4),
    ("local_m/causal", 3),
    ("scaled_dot/signed_softmax", 3),
    ("scaled_dot/sigmoid", 3),
    ("scaled_dot/softpick", 3),
    ("scaled_dot/entmax", 3),
    ("scaled_dot/sparsemax", 3),
    ("scaled_dot/dropout", 3),
    ("local_m/window", 3),
    ("local/causal", 4),
    ("local/alibi", 4),
    ("transformer_xl/none", 4),
    ("transformer_xl/window", 4),
    ("transformer_xl/alibi", 4),
    ("forgetting/causal", 5),  # two for the sums of gates
    ("location/causal", 3),
    ("scaled_dot/t5", 3),
  ],
)
def test_kernels_of_gradients_keep_no_registers_in_memory(
  tmp_path, case, kernels
):
  compiled(f"pallas/{case}/gradient", tmp_path)
  check_no_spills(tmp_path, kernels)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("derivative", "kernels", "limit"), [("forward", 1, 4), ("gradient", 4, 8)]
)
def test_two_channels_of_an_additive_score_cost_one_reciprocal(
  tmp_path, derivative, kernels, limit
):
  """And few instructions for each pair, without spills."""
  compiled(f"pallas/additive/none/{derivative}", tmp_path)
  check_no_spills(tmp_path, kernels)
  attention = 0
  for code in tmp_path.glob("*.sass*"):
    innermost = [
      loop
      for loop in loops(code.read_text())
      if loop["MUFU.RCP"] and not loop["MUFU.EX2"] and not loop["MUFU.TANH"]
    ]
    attention += bool(innermost)
    for loop in innermost:
      assert loop.total() <= limit * 2 * loop["MUFU.RCP"]
  assert attention == (1 if derivative == "forward" else 3)


# A score of arrays of these shapes, the features, the leading axes of the query
# and of the keys, and the kernels of its gradient.
SHAPES = {
  "shared keys": (scores.dot, (), 64, (2, 3), (2, 1), 3),
  "shared query": (
    lambda weight: scores.soft_cap(scores.general(weight), 5.0),
    ((128, 128),),
    *(128, (1, 3), (2, 3), 3),
  ),
  "matrix and shared keys": (
    lambda weight: scores.soft_cap(scores.general(weight), 5.0),
    ((128, 128),),
    *(128, (2, 3), (2, 1), 3),
  ),
  "shared keys, small": (scores.general, ((64, 64),), 64, (2, 3), (2, 1), 4),
  "matrix and a wrapper": (
    lambda weight: scores.soft_cap(scores.general(weight), 5.0),
    ((128, 128),),
    *(128, (2, 3), (2, 3), 4),
  ),
  "norms of shared tokens": (
    lambda number: scores.soft_cap(scores.cosine(number), 5.0),
    ((),),
    *(128, (1, 3), (2, 1), 4),
  ),
  "matrix of each head": (
    scores.general,
    ((3, 64, 64),),
    64,
    (2, 3),
    (2, 1),
    4,
  ),
  "few channels of each head": (
    scores.additive,
    ((3, 64, 8), (3, 64, 8), (3, 8), (3, 8)),
    *(64, (2, 3), (2, 3), 3),
  ),
  "projections of each head": (
    scores.additive,
    ((3, 64, 64), (3, 64, 64), (3, 64), (3, 64)),
    *(64, (2, 3), (2, 3), 4),
  ),
  "half projections, soft cap": (
    lambda *arrays: scores.soft_cap(
      scores.concat(*(each.astype(jnp.bfloat16) for each in arrays)), 5.0
    ),
    ((256, 64), (64,)),
    *(128, (2, 3), (2, 3), 4),
  ),
  "sinusoids of each head": (
    scores.transformer_xl,
    ((3, 64, 64), (3, 64), (3, 64)),
    *(64, (2, 3), (2, 1), 4),
  ),
  "half sinusoids, shared keys": (
    lambda *arrays: scores.transformer_xl(
      *(each.astype(jnp.bfloat16) for each in arrays)
    ),
    ((128, 128), (128,), (128,)),
    *(128, (2, 3), (2, 1), 4),
  ),
  "few sinusoids, soft cap": (
    lambda *arrays: scores.soft_cap(scores.transformer_xl(*arrays), 5.0),
    ((64, 128), (128,), (128,)),
    *(128, (2, 3), (2, 3), 4),
  ),
  "traced number": (
    lambda number: scores.temperature(scores.dot(), number),
    ((),),
    *(64, (2, 3), (2, 3), 3),
  ),
  "48 features": (scores.cosine, ((),), 48, (2, 3), (2, 3), 4),
  "few distances of 32 features": (
    lambda table: scores.soft_cap(scores.shaw(table), 5.0),
    ((3, 21, 32),),
    *(32, (2, 3), (2, 1), 4),
  ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_compile_for_other_shapes(name):
  """With a mask; the interpreter does not show what the compiler refuses."""
  make, shapes, features, of_query, of_key, kernels = SHAPES[name]
  launched = gradient_kernels(
    lambda arrays, lengths: {
      "score": make(*arrays),
      "mask": masks.padding(lengths),
    },
    [(shape, jnp.float32) for shape in shapes],
    [((2,), jnp.int32)],
    [(*of_query, 256, features), *[(*of_key, 256, features)] * 2],
  )
  assert launched == kernels


# A score, the shapes of its arrays and the features.
WRAPPED = {
  "function": (manhattan, ((),), 64),
  "local-m": (lambda: scores.local(scores.scaled_dot(), 40), (), 128),
  "soft cap": (lambda: scores.soft_cap(scores.dot(), 5.0), (), 128),
  "Shaw": (lambda x: scores.local(scores.shaw(x), 40), ((21, 64),), 64),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("normalizer", ["softpick", "sigmoid", "entmax"])
def test_other_normalizers_keep_no_registers_in_memory(
  name, normalizer, tmp_path, monkeypatch
):
  dumped(monkeypatch, tmp_path)
  make, shapes, features = WRAPPED[name]
  gradient_kernels(
    lambda arrays, lengths: {
      "score": make(*arrays),
      "normalizer": getattr(normalizers, normalizer)(),
      "mask": masks.causal() & masks.padding(lengths),
    },
    [(shape, jnp.float32) for shape in shapes],
    [((2, 1), jnp.int32)],
    [(2, 3, 256, features)] * 3,
  )
  # A process compiles equal kernels besides those of attention once.
  assert checked_reports(tmp_path) >= 3


@pytest.mark.exhaustive
def test_gradients_that_need_too_much_shared_memory_are_those_of_xla():
  def options(arrays, *others, **more):
    bias, mask = map(jax.lax.stop_gradient, others)
    score = scores.soft_cap(scores.general(*arrays), 5.0)
    return {"score": score, "bias": bias, "mask": mask, **more}

  def kernels(**more):
    return gradient_kernels(
      functools.partial(options, **more),
      [((128, 128), jnp.float32)],
      [((1, 3, 256, 256), jnp.bfloat16), ((1, 1, 256, 256), jnp.bool_)],
      [(2, 3, 256, 128)] * 3,
    )

  dropout = {"dropout_rate": 0.1, "rng": jax.random.key(0)}
  assert kernels() == 4
  assert kernels(normalizer=normalizers.softpick(), **dropout) == 1


def gradient_kernels(options, arrays, others, tokens):
  """Compiles the gradient of attention with options(arrays, *others)."""
  target = installed_target()
  sharding = on_one_device(target)

  def spec(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  def loss(arrays, query, key, value, others):
    context = attend(
      *(query, key, value),
      **options(arrays, *others),
      implementation=Pallas(target="hopper"),
    )
    return jnp.sum(context.astype(jnp.float32) ** 2)

  program, _ = cost.compiled(
    jax.grad(loss, (0, 1, 2, 3)),
    [spec(*each) for each in arrays],
    *[spec(shape, jnp.bfloat16) for shape in tokens],
    [spec(*each) for each in others],
    target=target,
  )
  return program.as_text().count('custom_call_target="mosaic_gpu')


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  "name", ["scaled_dot", "soft_cap", "general", "cosine", "additive"]
)
def test_masks_and_biases_of_pairs_keep_no_registers_in_memory(
  name, tmp_path, monkeypatch
):
  dumped(monkeypatch, tmp_path)
  make, shapes = SCORES[name]
  launched = gradient_kernels(
    lambda arrays, mask: {
      "score": make(*arrays[1:]),
      "bias": arrays[0],
      "mask": mask,
    },
    # The bias is differentiated too.
    [((1, 8, 512, 512), jnp.bfloat16)]
    + [(shape, jnp.float32) for shape in shapes],
    [((1, 1, 512, 512), jnp.bool_)],
    [(2, 8, 512, 128)] * 3,
  )
  assert launched == (3 if name in ("scaled_dot", "soft_cap") else 4)
  check_no_spills(tmp_path, launched)
