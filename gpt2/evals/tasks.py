"""The table of tasks, and the data options of the corpus that the task `validation` scores.

docs/evaluation.md lists the files of the tasks.
"""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from gpt2.config import DataConfig, load_config
from gpt2.data import prepare_dataset
from gpt2.data.datasets import Recorded, read_mixture, refuse_other
from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import UserError, require_choice
from gpt2.evals.core import core
from gpt2.evals.examples import hellaswag, lambada
from gpt2.evals.figures import Figure
from gpt2.evals.perplexity import compression, wikitext
from gpt2.evals.scoring import Scorer
from gpt2.utils import files, stores

Score = Callable[[Scorer, Tokenizer, Path], list[Figure]]
# Name of a task -> its file, and the function that scores it.
TASKS: dict[str, tuple[str, Score]] = {
    "wikitext": ("wikitext.txt", wikitext),
    "enwik8": ("enwik8", compression),
    "text8": ("text8", compression),
    "lambada": ("lambada.jsonl", lambada),
    "hellaswag": ("hellaswag.jsonl", hellaswag),
    "core": ("core.yaml", core),
}


def find_tasks(specs: Iterable[str]) -> list[tuple[Score, Path]]:
    """Return the scoring function and the file of each task.

    Each of `specs` is `NAME:DIRECTORY`, where NAME is a key of `TASKS`. Raise a UserError if NAME
    is not a key or occurs twice, or if the file does not exist. `validation` is not a key: it has
    no directory, eval.py handles it itself, and every run validates anyway.
    """
    found = dict[str, tuple[Score, Path]]()
    for spec in specs:
        name, _, directory = spec.partition(":")
        if name not in TASKS:
            require_choice("task", spec, tuple(TASKS))
        if name in found:
            raise UserError(f"The task {name} is listed twice", "List each task once")
        file, score = TASKS[name]
        path = Path(directory) / file
        if not path.is_file():
            raise UserError(
                f"The task {name} needs the file {path}, which does not exist",
                f"Give the directory of {file} as {name}:DIRECTORY",
            )
        found[name] = score, path
    return list(found.values())


def validation_data(
    workdir: str | None, hf: str | None, corpus: str, val_fraction: float | None
) -> tuple[DataConfig, Recorded]:
    """Return the `data.` options of the corpus whose validation split is scored, and its record.

    The model is the run in `workdir` or, without it, the Hugging Face model `hf`. If `corpus` is
    empty, return the options of the run, and the content of its data.json as the record. Otherwise,
    return the options of the run (for a Hugging Face model: the defaults) with some changes: the
    corpus is `corpus`, the tokenizer is the model's, and `val_fraction` replaces the option if it
    is not None. Repeated documents are scored, unless the run read the corpus or a part of it. The
    record is then None. Raise a UserError if no corpus is known, if the run's corpus has changed,
    or if `val_fraction` may select text on which the run was trained.
    """
    if workdir:
        folder = stores.fetch(workdir)
        data = load_config(folder).data
    else:
        folder = stores.fetch(hf or "", stores.HUGGING_FACE)
        data = DataConfig()
    path = folder / "data.json"
    has_corpus = bool(workdir) and path.exists()
    if not corpus:
        if not has_corpus:
            raise UserError(
                "--corpus is not set, and these weights do not record the corpus that they were "
                "trained on",
                f"Add --corpus={data.corpus}, or --corpus=text:FILE",
            )
        recorded = files.read_sealed(path)
        refuse_other(path, prepare_dataset(data, recorded))
        return data, recorded
    if val_fraction is None:
        val_fraction = data.val_fraction
    # A different fraction may select other documents, on some of which the run was trained.
    trained = set(read_mixture(data.corpus) or [data.corpus])
    overlaps = not trained.isdisjoint(read_mixture(corpus) or [corpus])
    if has_corpus and overlaps and val_fraction != data.val_fraction:
        raise UserError(
            f"--val_fraction={val_fraction} may select text that the run was trained on",
            f"Leave the flag out, or use the run's fraction, {data.val_fraction}",
        )
    tokenizer = str(folder / "tokenizer.json")
    data = dataclasses.replace(
        data,
        corpus=corpus,
        tokenizer=tokenizer,
        val_fraction=val_fraction,
        unique=data.unique and has_corpus and overlaps,
    )
    return data, None
