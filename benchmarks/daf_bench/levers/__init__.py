"""``daf bench levers``: which of the planner's levers a plan ever chooses."""
