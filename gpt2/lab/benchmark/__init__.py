"""Measure the time of training steps, alone or together with PyTorch."""
