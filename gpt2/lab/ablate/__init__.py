"""Sweeps: a baseline and its arms, trained with several seeds, and verdicts on the differences."""
