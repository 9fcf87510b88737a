"""``daf bench pack``: packing beside a GPU's forward pass."""
