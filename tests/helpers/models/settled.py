"""What the process holds once free memory and unused code went back, as a session counts it."""

import gc

from daf.memory import glibc, process_memory
from daf.memory.process_limit import CODE_BYTES


def settled_bytes() -> int:
    """Return the resident bytes, with as much code as a session leaves room for."""
    gc.collect()
    glibc.return_free_memory()
    return process_memory.resident_bytes() - process_memory.mapped_bytes() + CODE_BYTES
