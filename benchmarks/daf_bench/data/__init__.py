"""Data sets in their published files, by the entry points ``daf.data``, and the tasks on them."""
