"""Comparing runs: a grid of cells, trained one by one, and what they show."""
