"""``daf bench hosts``: training loops of other libraries, alone and within a budget."""
