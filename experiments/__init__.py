"""Experiments about attention, run as `python -m experiments.train`."""
