"""Scores and their gradients, computed by a block."""
