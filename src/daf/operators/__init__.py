"""Operators that DAF runs in place of PyTorch's: fused with the code they read, or in chunks.

One folder for each family. An operator is used only where it was seen to be the same.
"""
