"""`attend` against its peers: time, memory, accuracy.

    python -m benchmarks.attention --help

`cases` has the shapes and the scores, `peers` what is compared, `measure` how;
the sections of the table are in `scaled_dot`, `timings`, `memory`, `accuracy`,
`curves` and `heads`.
"""
