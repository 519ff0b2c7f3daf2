"""The kernels, their calls, and the arrays that these read and write."""
