"""Functions of pairs and of tokens, traced for the kernels."""
