"""The tasks by name; docs/evaluation.md gives the formats of their files."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from gpt2.data.corpus import reading
from gpt2.data.tokenizer import Tokenizer
from gpt2.evals.examples import cbt, hellaswag, lambada
from gpt2.evals.options import SLIDING
from gpt2.evals.perplexity import compression, wikitext
from gpt2.evals.report import Figure
from gpt2.evals.scoring import Scorer

# Called with scorer, tokenizer and path, each returns the figures of the file at the path. Those of
# `SLIDING` take the stride in tokens, too.
SCORES: dict[str, Callable[..., list[Figure]]] = {
    "wikitext": wikitext,
    "lambada": lambada,
    "hellaswag": hellaswag,
    "cbt": cbt,
    "enwik8": partial(compression, "enwik8"),
    "text8": partial(compression, "text8"),
}


def run_task(
    name: str, scorer: Scorer, tokenizer: Tokenizer, path: Path, stride: int
) -> list[Figure]:
    """Scores one task; `stride` (tokens) is for those that slide a window over a text.

    Raises:
        UserError: the task's file cannot be read.
    """
    with reading(path):
        return SCORES[name](scorer, tokenizer, path, *([stride] if name in SLIDING else []))
