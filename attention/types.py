"""Types of the arguments of public functions, with shapes as in jaxtyping.

`Shaped[Array, "... T D"]` is an array [..., T, D]; type checkers ignore the
shape. The letters of the axes are those of docs/design.md.
"""

from collections.abc import Callable
from typing import Annotated as Shaped
from typing import Any

import jax
import numpy as np

from attention.biases import Bias
from attention.masks.types import Mask
from attention.normalizers import Normalizer
from attention.scores import Score

Array = jax.Array | np.ndarray

Query = Shaped[Array, "... T Dq"]
Key = Shaped[Array, "... S Dk"]
Value = Shaped[Array, "... S E"]
Weights = Shaped[jax.Array, "... T S"]
# A pair if the caller asks for one, which a type cannot say without overloads.
ContextAndLse = Shaped[Any, "... T E, or a pair of it and the lse ... T"]

MaskLike = Mask | Shaped[Array, "bool, broadcasts to ... T S"]
BiasLike = Bias | Shaped[Array, "broadcasts to ... T S"]
ScoreLike = Score | Callable[[jax.Array, jax.Array], jax.Array]
NormalizerLike = Normalizer | Callable[[jax.Array], jax.Array]
