"""The budget in force now, from live limits and the user's request.

What the process holds belongs to ``memory``, what to do under a budget to ``planning``.
"""
