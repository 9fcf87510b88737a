"""The limits that ``ulimit`` sets on this process."""

from __future__ import annotations

import sys


def soft_limit_bytes(name: str) -> int | None:
    """Return this process's soft limit of ``name`` (``"RLIMIT_AS"``: ``ulimit -v``); None: none."""
    if sys.platform == "win32":
        return None
    import resource  # Unix only

    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft
