"""One saved tensor: the backward rule that reads it, its treatment, and what is stored in its place.

The ledger counts what is held. What runs the forward pass and installs hooks is ``capture``.
"""
