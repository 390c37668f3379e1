"""The tasks by name, and the file that each reads; docs/evaluation.md gives the formats."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import UserError
from gpt2.evals.examples import cbt, hellaswag, lambada
from gpt2.evals.perplexity import compression, wikitext
from gpt2.evals.report import Figure
from gpt2.evals.scoring import Scorer

# name: (file in the task directory, function, whether it slides a window and takes its stride)
TASKS: dict[str, tuple[str, Callable[..., list[Figure]], bool]] = {
    "wikitext": ("wikitext.txt", wikitext, True),
    "lambada": ("lambada.jsonl", lambada, False),
    "hellaswag": ("hellaswag.jsonl", hellaswag, False),
    "cbt": ("cbt.txt", cbt, False),
    "enwik8": ("enwik8", partial(compression, "enwik8"), True),
    "text8": ("text8", partial(compression, "text8"), True),
}


def task_file(name: str, directory: str) -> Path:
    """Returns where a task's file lies.

    Raises:
        UserError: there is no such task, or no such file, or nothing in it.
    """
    if name not in TASKS:
        raise UserError(f"{name} is no task", f"Choose from validation, {', '.join(TASKS)}")
    path = Path(directory) / TASKS[name][0]
    if not directory or not path.is_file():
        raise UserError(
            f"the task {name} reads {path}, which is not there",
            "Give its directory as --task_dir; docs/evaluation.md says what it holds",
        )
    if not path.stat().st_size:
        raise UserError(f"{path} is empty", "docs/evaluation.md says what it holds")
    return path


def run_task(
    name: str, scorer: Scorer, tokenizer: Tokenizer, path: Path, stride: int
) -> list[Figure]:
    """Scores one task; `stride` (tokens) is for those that slide a window over a text."""
    _, function, slides = TASKS[name]
    return function(scorer, tokenizer, path, *([stride] if slides else []))
