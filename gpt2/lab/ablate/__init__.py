"""Ablations: change one thing, run again, and know whether it helped."""
