"""Batch normalisation with the residual addition and ReLU that follow it."""
