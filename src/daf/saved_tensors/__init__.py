"""One saved tensor: the rule that reads it in backward, its treatment, what is stored instead."""
