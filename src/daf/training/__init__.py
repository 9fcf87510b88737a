"""The training application of ``daf train``: models, data, tasks, run folders, the loop."""
