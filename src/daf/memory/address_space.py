"""How many addresses this process may use."""

from __future__ import annotations

import sys


def address_space_limit_bytes() -> int | None:
    """The limit on this process's address space (``ulimit -v``); None where there is none."""
    if sys.platform == "win32":
        return None
    import resource  # Unix only

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
