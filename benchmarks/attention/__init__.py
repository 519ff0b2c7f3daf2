"""Compares `attend` with other implementations: time, memory, accuracy.

    python -m benchmarks.attention --help

`cases` has the shapes and scores, `peers` the implementations, and `measure`
the timing; the sections of the table are in `scaled_dot`, `timings`, `memory`,
`accuracy`, `curves` and `heads`.
"""
