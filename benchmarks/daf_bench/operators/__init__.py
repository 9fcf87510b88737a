"""``daf bench operators``: fused and chunked operators."""
