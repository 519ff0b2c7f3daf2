"""Operations on arrays: axes, matrix products, row sums, meshes."""
