"""The tasks by name, and the text that `validation` scores; docs/evaluation.md has their files."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from gpt2.config import DataConfig, load_config
from gpt2.data import prepare
from gpt2.data.dataset import refuse_other
from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import UserError, require_choice
from gpt2.evals.core import core
from gpt2.evals.examples import hellaswag, lambada
from gpt2.evals.perplexity import compression, wikitext
from gpt2.evals.report import Figure
from gpt2.evals.scoring import Scorer
from gpt2.utils import stores

# The file of each task and its score.
Score = Callable[[Scorer, Tokenizer, Path], list[Figure]]
TASKS: dict[str, tuple[str, Score]] = {
    "wikitext": ("wikitext.txt", wikitext),
    "enwik8": ("enwik8", compression),
    "text8": ("text8", compression),
    "lambada": ("lambada.jsonl", lambada),
    "hellaswag": ("hellaswag.jsonl", hellaswag),
    "core": ("core.yaml", core),
}


def find_task(spec: str) -> tuple[Score, Path]:
    """Returns the score and the file of a task, given as NAME:DIRECTORY."""
    name, _, directory = spec.partition(":")
    require_choice("task", name, tuple(TASKS))
    file, score = TASKS[name]
    path = Path(directory) / file
    if not path.is_file():
        how = f"Name its directory, as {name}:DIRECTORY"
        raise UserError(f"the task {name} reads {path}, no file", how)
    return score, path


def validation_data(
    workdir: str | None, hf: str | None, corpus: str, val_fraction: float | None
) -> DataConfig:
    """Returns the options of the corpus whose validation split is scored.

    A corpus other than the run's is divided and prepared with the run's options.
    """
    if workdir:
        folder = stores.fetch(workdir)
        data = load_config(folder).data
    else:
        folder = stores.fetch(hf or "", stores.HUGGING_FACE)
        data = DataConfig()
    learnt_here = (folder / "data.json").exists()
    if not corpus:
        if not learnt_here:
            how = f"Add --corpus={data.corpus}, or text:FILE"
            raise UserError("these weights came without a corpus", how)
        refuse_other(folder / "data.json", prepare(data))
        return data
    share = data.val_fraction if val_fraction is None else val_fraction
    # A smaller share is refused too, since the share decides which documents are chosen.
    if learnt_here and corpus == data.corpus and share != data.val_fraction:
        raise UserError(
            f"--val_fraction={share} may hold text that the run learnt from"
        )
    tokenizer = str(folder / "tokenizer.json")
    return dataclasses.replace(
        data, corpus=corpus, tokenizer=tokenizer, val_fraction=share
    )
