"""The same kernels on a GPU, in Triton: ``*_kernels`` and codecs run there, the others launch them."""
