"""Trained models restored from a run directory and applied to text."""
