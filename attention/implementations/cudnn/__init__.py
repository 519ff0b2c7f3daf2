"""cuDNN's flash attention, called through JAX's interface to it."""

from attention.implementations.cudnn.implementation import CuDNN as CuDNN
