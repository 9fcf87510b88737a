"""``daf bench doors``: one budget through each way in, beside plain PyTorch's loop."""
