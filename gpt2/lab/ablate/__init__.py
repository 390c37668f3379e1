"""Sweeps: a baseline and its arms with several seeds each, and verdicts on the differences."""
