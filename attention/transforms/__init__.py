"""What JAX's transformations need: rules of derivatives, traced functions."""
