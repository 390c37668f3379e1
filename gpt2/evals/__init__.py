"""Evaluation tasks, scored from local files according to published conventions."""
