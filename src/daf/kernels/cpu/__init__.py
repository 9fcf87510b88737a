"""The native kernels (C++ SIMD): raw addresses in, every argument checked, the GIL released.

One file for each family. What a kernel computes is stated in ``kernels.reference``.
"""
