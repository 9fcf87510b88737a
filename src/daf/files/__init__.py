"""Files that hold a state: written atomically, one tensor at a time."""
