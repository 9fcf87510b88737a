"""``daf bench kernels``, ``packing`` and ``reduce``: native and GPU kernels."""
