"""A file for each host: the same training as its users write it, alone and within a budget.

``plain`` and ``budgeted`` are the two scripts. ``hosts.lines`` counts what differs between them, so
that only what a user would write stands in them.
"""
