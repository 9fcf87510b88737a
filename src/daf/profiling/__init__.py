"""Measured small steps of a model become its profile, all that the planner reads of the model."""
