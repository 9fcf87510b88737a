"""Every private torch API that DAF uses, each behind a name of its own.

Nothing here knows of codes, plans or budgets.
"""
