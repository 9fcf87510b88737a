"""Benchmarks: each prints one JSON object with machine, rows and figures.

``models`` and ``data`` also serve ``daf train``, by the entry points of this distribution.
"""
