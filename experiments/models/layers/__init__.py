"""Layers that the RNN and the Transformer share."""
