"""One saved tensor: the rule that reads it in backward, its treatment, what is stored instead.

The ledger counts what is held. What runs the forward pass and installs hooks is ``capture``.
"""
