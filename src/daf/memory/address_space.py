"""The limit on this process's address space."""

from __future__ import annotations

import sys


def address_space_limit_bytes() -> int | None:
    """Return the limit on this process's address space (``ulimit -v``, bytes); None: no limit."""
    if sys.platform == "win32":
        return None
    import resource  # Unix only

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
