"""``daf bench bias``: what of the codes' errors does not average out, of many small networks."""
