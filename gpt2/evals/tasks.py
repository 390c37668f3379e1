"""The tasks by name, and the file that each reads; docs/evaluation.md gives the formats."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gpt2.data.corpus import reading
from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import UserError, require_choice
from gpt2.evals.examples import cbt, hellaswag, lambada
from gpt2.evals.perplexity import compression, wikitext
from gpt2.evals.report import Figure
from gpt2.evals.scoring import Scorer


@dataclasses.dataclass(frozen=True)
class Task:
    """A scored task.

    Attributes:
        file: its name in the task directory.
        score: `score(scorer, tokenizer, path)` returns the figures of the file at `path`.
        slides: whether it slides a window over a text; `score` then takes the stride in tokens too.
    """

    file: str
    score: Callable[..., list[Figure]]
    slides: bool = False


TASKS = {
    "wikitext": Task("wikitext.txt", wikitext, slides=True),
    "lambada": Task("lambada.jsonl", lambada),
    "hellaswag": Task("hellaswag.jsonl", hellaswag),
    "cbt": Task("cbt.txt", cbt),
    "enwik8": Task("enwik8", partial(compression, "enwik8"), slides=True),
    "text8": Task("text8", partial(compression, "text8"), slides=True),
}


def task_file(name: str, directory: str) -> Path:
    """Returns where a task's file lies.

    Raises:
        UserError: there is no such task, or its file is missing or empty.
    """
    require_choice("--tasks", name, (*TASKS, "validation"), flag=False)
    path = Path(directory) / TASKS[name].file
    if not directory or not path.is_file():
        raise UserError(
            f"the task {name} reads {path}, which does not exist",
            "Give its directory as --task_dir; docs/evaluation.md says what it holds",
        )
    if not path.stat().st_size:
        raise UserError(f"{path} is empty", "docs/evaluation.md says what it holds")
    return path


def run_task(
    name: str, scorer: Scorer, tokenizer: Tokenizer, path: Path, stride: int
) -> list[Figure]:
    """Scores one task; `stride` (tokens) is for those that slide a window over a text.

    Raises:
        UserError: the task's file cannot be read.
    """
    task = TASKS[name]
    with reading(path):
        return task.score(scorer, tokenizer, path, *([stride] if task.slides else []))
