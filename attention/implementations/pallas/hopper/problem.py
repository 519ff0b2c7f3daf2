"""What the kernels need besides arrays, and the arrays of a score."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from attention.implementations.pallas.hopper.kernels import calls
from attention.implementations.pallas.hopper.scores.channels import ChannelSum
from attention.implementations.pallas.hopper.scores.function_sum import (
  FunctionSum,
)
from attention.implementations.pallas.hopper.scores.normalization import Terms
from attention.implementations.pallas.hopper.terms.prediction_arrays import (
  SHARES,
  Prediction,
)
from attention.implementations.pallas.hopper.terms.score_term import ScoreTerm
from attention.implementations.pallas.hopper.tiles.device import Device
from attention.implementations.pallas.hopper.tiles.layout import SIDE
from attention.implementations.pallas.hopper.traced.bias_by_distance import (
  BiasGradient,
)
from attention.implementations.pallas.hopper.traced.pairs import PairFunction
from attention.implementations.pallas.normalizers import Sparse
from attention.implementations.pallas.operands import Kind, Operand
from attention.implementations.pallas.results import Results

# Arrays of wrappers whose gradients are sums over pairs.
_NUMBERS = Kind.SCALAR, Kind.COLUMN, Kind.ROW


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Problem(Device):
  """What the kernels need besides arrays."""

  leading: tuple[int, ...]
  tiles: np.ndarray  # visibility, int8 [T / 64, S / 64]
  channels: ChannelSum | None  # None for dot products
  factor: float  # of a dot product
  changed: PairFunction | None  # what wrappers do to the products or sums
  bias: PairFunction | None
  visible: PairFunction | None
  term: ScoreTerm  # of the score
  prediction: Prediction | None  # of local-p
  key_scale: Callable[[], Operand] | None  # of keys, for blocks of queries
  of_bias: BiasGradient | None  # of values per relative distance
  bias_numbers: Sequence[str]  # other arrays of the bias with gradients
  normalizer: Terms | None  # None for softmax and `Quotient`
  sparse: Sparse | None  # the same normalizer, as functions of rows
  dropout: PairFunction | None  # the factors of weights
  has_gradients: bool
  weight: Operand | None  # of the channels of an additive score
  # Whether keys may be hidden. NaN in a hidden token then changes nothing, and
  # the rows that attend to NaN become NaN, without derivatives.
  is_masked: bool
  bias_may_hide: bool  # whether a number of the bias may be -inf

  @property
  def differentiable(self) -> dict[str, Operand]:
    """The arrays whose gradients the kernels compute, by names of inputs."""
    changed: dict[str, Operand] = {}
    if self.changed is not None:
      changed = dict(zip(self.changed.names, self.changed.operands))
    numbers = {
      name: each
      for name, each in changed.items()
      if each.kind in _NUMBERS and name != SHARES
    }
    if self.bias is not None:
      own = [*self.bias_numbers]
      own += [] if self.of_bias is None else [self.of_bias.name]
      of_bias = dict(zip(self.bias.names, self.bias.operands))
      numbers |= {name: of_bias[name] for name in own}
    arrays = self._weights | numbers
    for each in self.terms:
      arrays |= each.differentiable
    return arrays

  @property
  def terms(self) -> list[ScoreTerm]:
    """The term of the score, and a prediction."""
    return [self.term] + ([self.prediction] if self.prediction else [])

  @property
  def own_numbers(self) -> list[str]:
    """The numbers of own queries, which a block computes."""
    return [name for each in self.terms for name in each.own_numbers]

  @property
  def keeps_scores(self) -> bool:
    """Whether gradients need scores after the products with values."""
    has_denominators = self.changed is not None and self.changed.num_results > 1
    return self.normalizer is not None or has_denominators

  @property
  def differentiable_operands(self) -> list[Operand]:
    """The arrays whose gradients the kernels compute."""
    return [*self.differentiable.values()]

  @functools.cached_property
  def operands(self) -> dict[str, Operand]:
    """The arrays besides tokens, by the names of inputs."""
    functions = self.changed, self.bias, self.visible, self.dropout
    operands = self._weights | {
      name: each
      for function in functions
      if function is not None
      for name, each in zip(function.names, function.operands)
      if name != SHARES
    }
    if isinstance(self.channels, FunctionSum):
      operands |= self.channels.constants
    if self.key_scale is not None:
      operands["key scale"] = self.key_scale()
    for term in self.terms:
      operands |= {**term.constants, **term.differentiable}
    return operands

  @property
  def buckets(self) -> Mapping[str, np.ndarray]:
    """The bucket of each distance, for operands with numbers of buckets."""
    return {} if self.bias is None else self.bias.buckets

  @property
  def _weights(self) -> dict[str, Operand]:
    return {} if self.weight is None else {"weight": self.weight}

  @property
  def arrays(self) -> list[jax.Array]:
    """The arrays of all operands."""
    return [each.array for each in self.operands.values()]

  @property
  def padded_lengths(self) -> tuple[int, int]:
    """T and S, rounded up to tiles."""
    rows, columns = self.tiles.shape
    return rows * SIDE, columns * SIDE

  def forward(
    self,
    operands: Sequence[jax.Array],
    tokens: Sequence[jax.Array],
    *,
    for_gradients: bool,
  ) -> Results:
    """The context, and what the gradients need."""
    arrays = calls.Arrays(operands, tokens)
    return calls.forward(self, arrays, for_gradients=for_gradients)

  def gradients(
    self,
    operands: Sequence[jax.Array],
    tokens: Sequence[jax.Array],
    rows: Mapping[str, jax.Array],
    wanted: Sequence[int],
    *,
    of_keys: bool,
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """The gradients of tokens, and of the wanted operands of the score.

    Without `of_keys` the first are those of the queries only.
    """
    arrays = calls.Arrays(operands, tokens)
    names = [[*self.differentiable][number] for number in wanted]
    return calls.gradients(self, arrays, rows, names, of_keys=of_keys)
