"""Compares trainings: a grid of trials, their results, statistics, a report."""
