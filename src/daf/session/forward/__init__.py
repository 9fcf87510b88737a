"""Budgets for loops that keep their step: of their forward passes, found in a script or named."""
