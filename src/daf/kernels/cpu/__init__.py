"""The native kernels (C++ SIMD), a file for each family; ``kernels.reference`` is their oracle.

They take raw addresses, check every argument and release the GIL.
"""
