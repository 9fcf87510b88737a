"""Values that every package shares: policies, plans, profiles, reports, the code format, errors.

No torch, no device, no other package of DAF. A type belongs here when two packages that may not
import each other need it.
"""
