"""Exact recomputation by the graph of values, beside plain PyTorch."""
