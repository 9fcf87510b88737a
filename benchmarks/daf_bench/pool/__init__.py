"""``daf bench pool``: the paged pool."""
