"""Evaluation sets: predictions, metrics and reports."""

from experiments.evaluation.evaluator import Evaluation, make_evaluator

__all__ = ["Evaluation", "make_evaluator"]
