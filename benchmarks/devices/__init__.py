"""Attention on a GPU or TPU: errors of kernels, and times beside peers."""
