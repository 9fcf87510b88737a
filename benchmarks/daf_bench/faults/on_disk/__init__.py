"""Runs killed, damaged, or out of disk, and data that lie: each tried on real files."""
