"""``daf bench start``: how long it takes until training runs as fast as it will."""
