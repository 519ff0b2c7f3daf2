"""Attention as pure functions: a score, a bias, a mask, and `attend`.

    context[i] = sum_j weights[i, j] * value[j]
    weights[i, :] = softmax_j(score(query[i], key[j]) + bias(i, j)
                              where mask(i, j))

`attend` computes this formula for a score, a mask and a bias of your choice.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from attention import (
    biases,
    cache,
    masks,
    modules,
    normalizers,
    positions,
    ring,
    scores,
  )
  from attention.adapters import dot_product_attention, flax_attention_fn
  from attention.api import attend, attention_weights
  from attention.merging import merge
  from attention.multi_head import (
    merge_heads,
    multi_head_attention,
    split_heads,
  )
  from attention.ring import ring_attention
  from attention.scores import (
    additive_score,
    concat_score,
    cosine_score,
    dot_score,
    general_score,
    scaled_dot_score,
  )

__all__ = [
  "additive_score",
  "attend",
  "attention_weights",
  "biases",
  "cache",
  "concat_score",
  "cosine_score",
  "dot_product_attention",
  "dot_score",
  "flax_attention_fn",
  "general_score",
  "masks",
  "merge",
  "merge_heads",
  "modules",
  "multi_head_attention",
  "normalizers",
  "positions",
  "ring",
  "ring_attention",
  "scaled_dot_score",
  "scores",
  "split_heads",
]

_MODULES = {
  "adapters": ("dot_product_attention", "flax_attention_fn"),
  "api": ("attend", "attention_weights"),
  "merging": ("merge",),
  "multi_head": ("merge_heads", "multi_head_attention", "split_heads"),
  "ring": ("ring_attention",),
  "scores": tuple(name for name in __all__ if name.endswith("_score")),
}


def __getattr__(name: str) -> Any:
  """Imports on first use (PEP 562): `import attention` stays cheap."""
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  for module, names in _MODULES.items():
    if name in names:
      value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
      globals()[name] = value
      return value
  return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
