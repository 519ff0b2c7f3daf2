"""Tiles of arrays in registers and shared memory, and products with them."""
