"""A training session: plans, steps, follows the budget, watches noise and divergence."""
