"""What the documents claim about time: `python -m benchmarks.NAME`."""
