"""A ladder of model sizes: does a change help a large model as much as a small model?

Start reading at __main__.py; then dial.py (the options of each size), courses.py (the verdicts) and
ladder_report.py. Each size is a sweep of gpt2/lab/ablate, so read that package first.
"""
