"""Benchmarks: each prints one JSON object with machine, rows and figures."""
