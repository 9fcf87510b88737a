"""Small measured steps of a model become its profile.

The planner reads nothing else of the model.
"""
