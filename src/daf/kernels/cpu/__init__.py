"""The native kernels (C++ SIMD): raw addresses in, every argument checked, the GIL released."""
