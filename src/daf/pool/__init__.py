"""Where the planes of codes live: the paged pool, device pools, pinned host memory.

A store gives out room for planes and takes it back; what a plane means is for ``codecs``.
"""
