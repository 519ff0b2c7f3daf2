"""What sharing, saving and starting again cost.

    python -m benchmarks.mesh --help

`ring`, `step`, `save` and `restart` each measure one thing, in a process of
their own, which `apart` starts.
"""
