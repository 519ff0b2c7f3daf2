"""The dense formula, which tests compare every implementation with."""

from attention.implementations.reference.implementation import (
  Reference as Reference,
)
from attention.implementations.reference.implementation import (
  weights as weights,
)
