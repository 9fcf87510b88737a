"""``daf bench sweep``: every workload at several budgets."""
