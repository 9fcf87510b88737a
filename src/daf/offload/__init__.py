"""Saved tensors that leave the device: spilled to disk, or coded in host memory."""
