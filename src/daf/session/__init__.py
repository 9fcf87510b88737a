"""A training session: plans and runs steps, follows the budget, watches noise and divergence."""
