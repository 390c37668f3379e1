"""Options of runs, one file each; `default.py` has them all."""
