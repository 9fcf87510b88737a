"""``daf bench faults``: refused memory, falling budgets, kills, damage, hostile data, full disks.

What is drawn depends on a seed, so that what passes is the kind and not a list. Each part returns
how much it tried and what went wrong.
"""
