"""The oracle: every kernel, written out readably in NumPy. Every backend equals its bytes."""
