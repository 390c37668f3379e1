"""Turn the options of `data.` into a dataset."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from gpt2.config import DataConfig
from gpt2.data.interfaces import Dataset
from gpt2.data.loading.token_batches import TokenDataset
from gpt2.data.readers import open_corpus
from gpt2.data.readers.downloads import with_revision
from gpt2.data.tokenizer import build, is_path
from gpt2.data.tokens import PreparedTokens
from gpt2.errors import UserError
from gpt2.utils import files, stores

_PLUS = re.compile(r"\+(?=\d*\.?\d+\*)")  # the plus sign before a part of a mixture
# The description of a run's data, read from the run's data.json; None if there is no such file.
Recorded = Mapping[str, Any] | None


def prepare_dataset(data: DataConfig, recorded: Recorded = None) -> Dataset:
    """Return the dataset of `data.corpus`. If a text is not prepared yet, prepare it first.

    `recorded` is the content of a run's data.json, or None for a new run. Data sets of the Hugging
    Face hub are read at the revisions in `recorded`, so that a continued run has the same text.
    """
    if data.end_of_text and not is_path(data.tokenizer):
        raise UserError(
            f"data.end_of_text={data.end_of_text} has no effect with data.tokenizer="
            f"{data.tokenizer}",
            "Leave it out, or set data.tokenizer to the path of a tokenizer.json",
        )
    recorded = recorded or {}
    weights = read_mixture(data.corpus)
    if weights:
        parts = recorded.get("parts") or [{}] * len(weights)
        return _prepare_mixture(data, weights, parts)
    corpus = data.corpus
    if "revision" in recorded:
        corpus = with_revision(corpus, recorded["revision"])
    try:
        return open_corpus(corpus).prepare(data)
    except ModuleNotFoundError as error:
        raise UserError(
            f"data.corpus={data.corpus} needs the package {error.name}",
            f"Run `pip install {error.name}`",
        ) from error


def _prepare_mixture(
    data: DataConfig,
    weights: dict[str, Fraction],
    recorded: Sequence[Recorded],
) -> Dataset:
    # All parts share one tokenizer. `build` gets no texts, so it raises an error if the tokenizer
    # would have to be trained on a corpus.
    tokenizer = build(data.tokenizer, end_of_text=data.end_of_text)
    parts = dict[str, tuple[Fraction, PreparedTokens]]()
    for (corpus, weight), part in zip(weights.items(), recorded, strict=True):
        dataset = prepare_dataset(dataclasses.replace(data, corpus=corpus), part)
        if not dataset.parts:
            raise UserError(
                f"{corpus} returns batches, which cannot be mixed with a text",
                "Mix the texts inside your function, and name only the function in data.corpus",
            )
        ((_, tokens),) = dataset.parts.values()
        parts[corpus] = weight, tokens
    return TokenDataset(tokenizer, parts)


def read_mixture(spec: str) -> dict[str, Fraction]:
    """Return a dict from each corpus to its weight, for a mixture such as `0.7*ONE+0.3*OTHER`.

    The weights are scaled so that they add up to 1. If `spec`, the value of `data.corpus`, names a
    single corpus, return an empty dict.
    """
    if not _PLUS.match(f"+{spec}"):
        return {}
    weights = dict[str, Fraction]()
    for part in _PLUS.split(spec):
        weight, name = part.split("*", 1)
        if name in weights or not Fraction(weight):
            raise UserError(
                f"data.corpus={spec} names {name} twice, or with a weight of 0",
                "Name each part once, with a weight above 0",
            )
        weights[name] = Fraction(weight)
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def refuse_other(path: Path, dataset: Dataset) -> bool:
    """Raise a UserError if a dataset differs from its description in `path`, a run's data.json.

    Return True if the two are equal. Return False if data.json is missing or was altered, so that
    nothing can be compared.
    """
    saved = files.read_sealed(path)
    if saved is None:
        return False
    if saved != dataset.describe():
        raise UserError(
            "The text, tokenizer or batch function is not the one with which "
            f"{stores.url_or_path(path.parent)} was trained",
            "Restore what has changed. Otherwise, train with another --workdir, or evaluate another"
            " text with eval.py's --corpus",
        )
    return True
