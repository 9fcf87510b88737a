"""Carrying a plan out: capture of saved tensors, micro-batches, checks."""
