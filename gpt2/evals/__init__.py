"""Scores that others can check: tasks from local files, each stating its convention."""
