"""Sweeps: a baseline and its variants (arms), trained with several seeds, and verdicts on the arms.

Start reading at __main__.py; then sweep.py (the runs), judge.py (the verdicts) and sweep_report.py.
"""
