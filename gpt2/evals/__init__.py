"""Scores that others can check: tasks from local files, each with its convention."""

from gpt2.evals.tasks import RunTasks
from gpt2.evals.validation import validate
