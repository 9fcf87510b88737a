"""Values that every package shares: policies, plans, profiles, reports, the code format, errors.

Nothing here imports torch, a device or another package of DAF. A type belongs here when two
packages that may not import each other both need it.
"""
