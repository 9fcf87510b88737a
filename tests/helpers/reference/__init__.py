"""The oracle: every kernel, readable in NumPy; every backend equals its bytes."""
