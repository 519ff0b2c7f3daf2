"""Measures the cost of sharding, asynchronous saves and restarts.

    python -m benchmarks.mesh --help

`ring`, `step`, `save` and `restart` each measure one of them; `processes`
starts the first three in separate processes.
"""
