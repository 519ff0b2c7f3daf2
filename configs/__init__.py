"""Experiments as plain values: `get_config(arg)` returns a `ConfigDict`."""
