"""``daf bench accuracy``: accuracy under DAF beside plain PyTorch and published codecs."""
