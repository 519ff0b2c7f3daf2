"""Implementations of attention, by name."""

from attention.implementations.base import Implementation
from attention.implementations.blockwise import Blockwise
from attention.implementations.cudnn import CuDNN
from attention.implementations.pallas import Pallas
from attention.implementations.reference import Reference
from attention.request import Request

__all__ = [
  "BY_NAME",
  "Blockwise",
  "CuDNN",
  "Implementation",
  "Pallas",
  "Reference",
  "Request",
]

BY_NAME: dict[str, Implementation] = {
  "reference": Reference(),
  "blockwise": Blockwise(),
  "cudnn": CuDNN(),
  "pallas": Pallas(),
}
