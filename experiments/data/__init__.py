"""Training and evaluation data: synthetic tasks and parallel text."""
