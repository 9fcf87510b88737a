"""One training step: micro-batches, the gradient, its release in backward, the state to go back to."""
