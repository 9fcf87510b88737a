"""Where the planes of codes live: the paged pool, device pools, pinned host memory.

A store allocates and frees planes; ``codecs`` gives them meaning.
"""
