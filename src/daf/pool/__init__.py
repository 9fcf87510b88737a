"""The stores of codes' planes: the paged pool, device pools, pinned host memory."""
