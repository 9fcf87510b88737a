"""DAF: train any PyTorch model inside a byte budget."""
