"""``daf bench papers``: the papers part by part, and DAF as published beside DAF's own plan."""
