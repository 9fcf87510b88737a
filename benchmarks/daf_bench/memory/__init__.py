"""``daf bench allocator``, ``pressure`` and ``survival``: the process's memory."""
