"""Implementations of attention: dense reference, cuDNN and blockwise."""
