"""Measures what the documents state about speed: python -m benchmarks.NAME."""
