"""Synthetic tasks: copy, reverse and lookup."""
