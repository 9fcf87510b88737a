"""The training application beneath ``daf train``: models, data, tasks, run folders, the loop."""
