"""What small measured steps of a model tell: its profile.

The planner reads nothing else of the model.
"""
