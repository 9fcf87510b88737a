"""The kernels on a GPU, in Triton: ``*_kernels`` and codecs run there, other files launch them."""
