"""Files that hold a state: written whole or not at all, one tensor at a time."""
