"""Time training steps, alone or next to PyTorch."""
