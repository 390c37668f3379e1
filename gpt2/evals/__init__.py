"""Scores that others can check: tasks from local files, each with its convention."""
