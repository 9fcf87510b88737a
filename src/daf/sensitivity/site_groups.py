"""Groups sites that are redrawn together if there are more sites than passes: pure, no torch.

One site may add a thousand times less than another and would be lost beside it. So each redraws
alone while passes last, then with sites of the same role in neighbouring layers.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

from daf.core.policy import Site

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a path: norm1 is not norm2


def alike_groups(sites: Sequence[Site], most: int) -> list[tuple[Site, ...]]:
    """Return at most ``most`` (1 or more) groups, as small as can be, of neighbours of one role.

    ``sites`` are in forward's order. With more roles than groups, neighbours of several share.
    """
    # Layers of one kind share what they save at the same place; then a module's calls join too.
    for role in (lambda site: (_role(site), site.call), _role):
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


def _role(site: Site) -> Hashable:
    return _NUMBER.sub("", site.module), site.operator, site.save


def _cut(sites: Sequence[Site], parts: int) -> list[tuple[Site, ...]]:
    """Return ``parts`` runs of neighbours, of nearly equal lengths."""
    borders = [round(part * len(sites) / parts) for part in range(parts + 1)]
    return [tuple(sites[low:high]) for low, high in pairwise(borders)]
