"""The flags of eval.py, and what of them is refused before JAX is imported."""

from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.config import DataConfig
from gpt2.errors import UserError, require_choice

VALIDATION = "validation"  # the task that needs a corpus in place of a file
TASK_FILES = {
    "wikitext": "wikitext.txt",
    "lambada": "lambada.jsonl",
    "hellaswag": "hellaswag.jsonl",
    "cbt": "cbt.txt",
    "enwik8": "enwik8",
    "text8": "text8",
}
SLIDING = ("wikitext", "enwik8", "text8")  # tasks that slide a window over a text


def define_flags() -> None:
    """Defines the flags of eval.py."""
    cli.define_source()
    values = flags.FLAGS
    flags.DEFINE_list(
        "tasks", [VALIDATION], f"Any of {', '.join((VALIDATION, *TASK_FILES))}.", flag_values=values
    )
    flags.DEFINE_string("task_dir", "", "Directory of the tasks' files.", flag_values=values)
    flags.DEFINE_string(
        "corpus",
        "",
        "Corpus whose validation split to score, as data.corpus; the run's if empty.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "val_fraction",
        None,
        "Share of --corpus to score, as data.val_fraction, 1 for all of it; if not given, that of "
        "the run, or "
        f"{DataConfig.val_fraction} without one.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "stride",
        0,
        "Tokens that a sliding window moves; 0: half of the context.",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_string("output", None, "JSON file to write the figures to.", flag_values=values)


def check() -> None:
    """Refuses flags that change nothing, no or unknown tasks, and files that are not there."""
    args = flags.FLAGS
    cli.check_source()
    if not args.tasks or len(set(args.tasks)) < len(args.tasks):
        raise UserError(
            f"--tasks={','.join(args.tasks)} names {'a task twice' if args.tasks else 'no task'}",
            f"Choose from {', '.join((VALIDATION, *TASK_FILES))}",
        )
    if not args.corpus:
        cli.refuse_ignored("val_fraction", "it divides --corpus")
    if args.val_fraction is not None and not 0.0 < args.val_fraction <= 1.0:
        raise UserError(
            f"--val_fraction={args.val_fraction} is out of range", "Use a share above 0, up to 1"
        )
    if VALIDATION not in args.tasks:
        cli.refuse_ignored("corpus", "it is for --tasks=validation")
    if args.tasks == [VALIDATION]:
        cli.refuse_ignored("task_dir", "--tasks=validation reads no file of it")
    if not set(SLIDING) & set(args.tasks):
        cli.refuse_ignored("stride", "none of --tasks slides a window")
    for name in args.tasks:
        if name != VALIDATION:
            task_file(name, args.task_dir)


def task_file(name: str, directory: str) -> Path:
    """Returns where a task's file lies.

    Raises:
        UserError: there is no such task, or its file is missing or empty.
    """
    require_choice("--tasks", name, (*TASK_FILES, VALIDATION), flag=False)
    path = Path(directory) / TASK_FILES[name]
    if not directory or not path.is_file():
        raise UserError(
            f"the task {name} reads {path}, which does not exist",
            "Give its directory as --task_dir; docs/evaluation.md says what it holds",
        )
    if not path.stat().st_size:
        raise UserError(f"{path} is empty", "docs/evaluation.md says what it holds")
    return path
