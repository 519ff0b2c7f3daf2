"""Checkpoints of a run; the only package that imports Orbax.

A run imports `listing` at its start, and the others, which import Orbax, when
it needs them: this takes half a second.
"""
