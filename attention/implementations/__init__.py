"""Implementations of attention, by name: reference, blockwise, cudnn."""

from attention.implementations.base import Implementation
from attention.implementations.blockwise import Blockwise
from attention.implementations.cudnn import CuDNN
from attention.implementations.reference import Reference
from attention.request import Request

__all__ = [
  "BY_NAME",
  "Blockwise",
  "CuDNN",
  "Implementation",
  "Reference",
  "Request",
]

BY_NAME: dict[str, Implementation] = {
  "reference": Reference(),
  "blockwise": Blockwise(),
  "cudnn": CuDNN(),
}
