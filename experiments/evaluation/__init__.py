"""Evaluation sets: predictions, metrics and reports."""
