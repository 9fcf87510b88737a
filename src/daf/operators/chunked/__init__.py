"""Convolutions, linear layers, attention and cross-entropy, a chunk of the batch at a time."""
