"""Values that every package shares, without torch, devices or other packages of DAF.

A type belongs here when two packages that may not import each other need it.
"""
