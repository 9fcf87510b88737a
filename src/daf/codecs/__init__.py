"""Tensor to planes and back: one class for each kind of code, on the processor and on a GPU.

A codec turns a dense tensor into planes that lie in a store (``pool``), and back. Which codec a
saved tensor gets is for ``saved_tensors``.
"""
