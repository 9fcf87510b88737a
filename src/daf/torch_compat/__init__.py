"""Every private torch API that DAF uses, behind names of its own; nothing of codes or budgets."""
