"""The implementations: `attend` and its peers in other libraries.

Every peer gets its arguments in its native layout.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention import attend
from benchmarks.attention import cases, settings
from benchmarks.attention.measure import Contender, compiled
from benchmarks.attention.score_cases import ScoreCase
from experiments.cores import num_cores

# By name in the table; None dispatches.
OURS = {"dispatched": None, "blockwise": "blockwise", "reference": "reference"}


def _optional(name: str) -> Any:
  try:
    return importlib.import_module(name)
  except ImportError:
    return None


torch = _optional("torch")
attnax = _optional("attnax")
if torch is not None:
  torch.set_num_threads(num_cores())


def has_torch() -> bool:
  """Whether PyTorch is installed and runs on JAX's device."""
  return torch is not None and jax.default_backend() == "cpu"


def versions() -> list[str]:
  """The versions of the peers, a line each."""
  lines = [f"jax.nn: jax {jax.__version__}"]
  if torch is None:
    lines.append("torch: skipped: not installed")
  elif not has_torch():
    lines.append("torch: skipped: compared on CPUs only")
  else:
    threads = torch.get_num_threads()
    lines.append(f"torch: {torch.__version__}, {threads} threads")
  if attnax is None:
    lines.append("attnax: skipped: not installed")
  else:
    lines.append(f"attnax: {settings.version('attnax')}")
  return lines


def ours(
  implementation: str,
  shape: Sequence[int],
  direction: str,
  *,
  score: str | ScoreCase = "scaled_dot",
  mask: Any = None,
  normalizer: Any = None,
  size: int = cases.SIZE,
  name: str | None = None,
) -> Contender:
  """`attend` with an implementation of `OURS` and a score of `cases.SCORES`.

  The shape is [B, H, T]; the name in the table is `implementation` by default.
  """
  case = cases.SCORES[score] if isinstance(score, str) else score

  def context(query, key, value, *parameters):
    return attend(
      query,
      key,
      value,
      score=case.bind(*parameters),
      mask=mask,
      normalizer=normalizer,
      implementation=OURS[implementation],
    )

  arguments = [*cases.tokens(shape, size), *cases.parameters(case)]
  return compiled(name or implementation, context, arguments, direction)


def jax_nn(
  shape: Sequence[int],
  direction: str,
  *,
  causal: bool = False,
  window: tuple[int, int] | None = None,
  size: int = cases.SIZE,
) -> Contender:
  """`jax.nn.dot_product_attention`, [B, T, H, D]."""

  def context(query, key, value):
    return jax.nn.dot_product_attention(
      query, key, value, is_causal=causal, local_window_size=window
    )

  arguments = [jnp.swapaxes(each, 1, 2) for each in cases.tokens(shape, size)]
  return compiled("jax.nn", context, arguments, direction)


def scaled_dot_peers(
  shape: Sequence[int],
  direction: str,
  causal: bool,
  *,
  size: int = cases.SIZE,
  with_attnax: bool = True,
) -> list[Contender]:
  """The peers that are installed, for scaled dot-product attention."""
  found = [jax_nn(shape, direction, causal=causal, size=size)]
  tokens = cases.tokens(shape, size)
  if has_torch():

    def sdpa(query, key, value):
      return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=causal
      )

    found.append(_torch("torch", sdpa, tokens, direction))
  if attnax is not None and with_attnax:

    def flash(query, key, value):
      length = query.shape[-2]
      mask = attnax.make_causal_mask(length) if causal else None
      return attnax.flash_attention(query, key, value, mask=mask)

    found.append(compiled("attnax", flash, tokens, direction))
  return found


def additive_peers(shape: Sequence[int], direction: str) -> list[Contender]:
  """The additive formula, written plainly."""
  case = cases.SCORES["additive"]
  arguments = [*cases.tokens(shape), *cases.parameters(case)]
  found = [compiled("plain jax", _plain_jax, arguments, direction)]
  if has_torch():
    found.append(_torch("plain torch", torch_additive, arguments, direction))
  return found


def _plain_jax(query, key, value, query_weight, key_weight, score_weight):
  query, key = query @ query_weight, key @ key_weight
  hidden = jnp.tanh(query[..., :, None, :] + key[..., None, :, :])
  return jax.nn.softmax(hidden @ score_weight, axis=-1) @ value


def torch_additive(query, key, value, query_weight, key_weight, score_weight):
  """The additive formula of PyTorch's arrays."""
  query, key = query @ query_weight, key @ key_weight
  hidden = torch.tanh(query[..., :, None, :] + key[..., None, :, :])
  return torch.softmax(hidden @ score_weight, dim=-1) @ value


def _torch(
  name: str, function: Callable, arguments: Sequence, direction: str
) -> Contender:
  """A PyTorch function of JAX arrays."""
  backward = direction != "forward"
  tensors = [
    torch.tensor(np.asarray(each), requires_grad=backward) for each in arguments
  ]
  with torch.no_grad():
    cotangent = torch.tensor(
      np.asarray(cases.draw(function(*tensors).shape, 9))
    )

  def run():
    with torch.set_grad_enabled(backward):
      context = function(*tensors)
    if not backward:
      return context
    return context, torch.autograd.grad(context, tensors, cotangent)

  return Contender(name, run, _torch_temporaries(run))


def _torch_temporaries(run) -> int:
  """The peak of PyTorch's allocations, minus the results."""
  with _quiet(), torch.profiler.profile(profile_memory=True) as profile:
    results = run()
  changes = sorted(
    (event.start_ns(), event.nbytes())
    for event in profile.profiler.kineto_results.events()
    if event.name() == "[memory]"
  )
  del results
  held = np.cumsum([change for _, change in changes] or [0])
  return int(max(held.max() - held[-1], 0))


@contextlib.contextmanager
def _quiet():
  """Discards standard error, also that of PyTorch's profiler in C++."""
  saved = os.dup(2)
  try:
    with open(os.devnull, "w") as null:
      os.dup2(null.fileno(), 2)
    yield
  finally:
    os.dup2(saved, 2)
    os.close(saved)
