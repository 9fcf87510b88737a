"""One training step: micro-batches, the gradient, its release, and the state to restore."""
