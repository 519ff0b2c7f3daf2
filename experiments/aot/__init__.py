"""Compiles programs for accelerators that this machine does not have."""
