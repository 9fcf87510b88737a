"""The same kernels on a GPU, in Triton: ``*_kernels`` and codecs run there, others launch them."""
