"""The synthetic tasks copy, reverse and lookup."""
