"""The default store of codes."""

from __future__ import annotations

from daf.core.errors import PoolFullError
from daf.memory.process_memory import soft_limit_bytes
from daf.pool.paged_pool import PagedStore
from daf.pool.store import PlainStore, Store


def make_store(cap_bytes: int | None = None) -> Store:
    """Return the paged pool; plain buffers where addresses are short and no cap was asked for.

    ``cap_bytes`` (None: no cap) includes page tables and records. KernelError: it is invalid;
    PoolFullError: it was asked for, and the system grants no addresses.
    """
    if cap_bytes is None and soft_limit_bytes("RLIMIT_AS") is not None:
        return PlainStore()  # the range that the pool reserves would be missing elsewhere
    try:
        return PagedStore(cap_bytes, page_bytes=None, charged=True)
    except PoolFullError:
        if cap_bytes is not None:
            raise
        return PlainStore()
