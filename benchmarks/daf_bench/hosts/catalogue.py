"""Which hosts there are, and what has to be installed for each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType

from daf.core.errors import UnknownNameError

# By name, as in ``hosts.scripts``: title and packages.
HOSTS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "trainer": ("`transformers.Trainer`", ("transformers", "accelerate")),
        "sft": ("TRL's `SFTTrainer`", ("transformers", "accelerate", "trl", "datasets")),
        "dpo": ("TRL's `DPOTrainer`", ("transformers", "accelerate", "trl", "datasets")),
        "lightning": ("Lightning's `Trainer`", ("transformers", "lightning")),
        "fabric": ("Fabric", ("transformers", "lightning")),
        "accelerate": ("Accelerate", ("transformers", "accelerate")),
        "own": ("a loop of one's own", ("transformers",)),
    }
)


def missing(host: str) -> list[str]:
    """Return the packages that a host needs and that are not installed."""
    return [package for package in HOSTS[host][1] if find_spec(package) is None]


def named_hosts(names: str) -> tuple[str, ...]:
    """Return the hosts in a list such as ``"trainer,own"``.

    Raises:
        UnknownNameError: there is no such host.
    """
    found = tuple(name.strip().lower() for name in names.split(","))
    for name in found:
        if name not in HOSTS:
            near = difflib.get_close_matches(name, HOSTS, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownNameError(f"unknown host {name!r}; {hint}Known: {', '.join(HOSTS)}")
    return found
