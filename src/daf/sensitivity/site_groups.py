"""Which sites are redrawn together, where there are more of them than passes: pure, no torch.

What one site adds beside another may be a thousand times less, and would be lost in a pass
in which both redraw. So each redraws alone as far as there are passes, and beyond that with sites
that do the same in neighbouring layers, which are alike.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

from daf.core.policy import Site

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a path: norm1 is not norm2


def alike_groups(sites: Sequence[Site], most: int) -> list[tuple[Site, ...]]:
    """At most ``most`` groups, as small as can be, each of neighbours that have one role.

    If there are more roles than groups, neighbours of several roles share one.

    Args:
        sites: in the order of the forward pass.
        most: at least 1.
    """
    for role in (_role_in_module, _role):
        alike = _by(role, sites)
        for size in range(1, len(sites) + 1):
            runs = [_cut(each, -(-len(each) // size)) for each in alike]
            if sum(map(len, runs)) <= most:
                return [group for groups in runs for group in groups]
    return _cut([site for each in alike for site in each], most)


def _by(role: Callable[[Site], Hashable], sites: Sequence[Site]) -> list[list[Site]]:
    found: dict[Hashable, list[Site]] = defaultdict(list)
    for site in sites:
        found[role(site)].append(site)
    return list(found.values())


def _role_in_module(site: Site) -> Hashable:
    """The same for what layers of one kind save at the same place."""
    return _role(site), site.call


def _role(site: Site) -> Hashable:
    """And where layers are no modules of their own, in one call after the other."""
    return _NUMBER.sub("", site.module), site.operator, site.save


def _cut(sites: Sequence[Site], parts: int) -> list[tuple[Site, ...]]:
    """So many runs of neighbours, of nearly equal lengths."""
    borders = [round(part * len(sites) / parts) for part in range(parts + 1)]
    return [tuple(sites[low:high]) for low, high in pairwise(borders)]
