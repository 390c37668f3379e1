"""From the options of the data to a dataset."""

import dataclasses
import re
from fractions import Fraction
from pathlib import Path

from gpt2.config import DataConfig
from gpt2.data.interfaces import Dataset
from gpt2.data.loading.token_batches import TokenDataset
from gpt2.data.readers import open_corpus
from gpt2.data.tokenizer import build
from gpt2.data.tokens import PreparedTokens
from gpt2.errors import UserError
from gpt2.utils import files

_PLUS = re.compile(r"\+(?=\d*\.?\d+\*)")  # before each part of a mixture


def prepare(data: DataConfig) -> Dataset:
    """Return the dataset of `data.corpus`. A text is written as tokens first, once."""
    weights = read_mixture(data.corpus)
    if weights:
        return _prepare_mixture(data, weights)
    try:
        return open_corpus(data.corpus).prepare(data)
    except ModuleNotFoundError as error:
        raise UserError(
            f"data.corpus={data.corpus} needs the package {error.name}",
            f"Run `pip install {error.name}`",
        ) from error


def _prepare_mixture(data: DataConfig, weights: dict[str, Fraction]) -> Dataset:
    # The parts share it, so that it is refused if it would be trained on each of them.
    tokenizer = build(data.tokenizer, end_of_text=data.end_of_text)
    parts = dict[str, tuple[Fraction, PreparedTokens]]()
    for corpus, weight in weights.items():
        dataset = prepare(dataclasses.replace(data, corpus=corpus))
        if not dataset.parts:
            raise UserError(
                f"{corpus} returns batches, which cannot be mixed with a text",
                "Mix in the function",
            )
        ((_, tokens),) = dataset.parts.values()
        parts[corpus] = weight, tokens
    return TokenDataset(tokenizer, parts)


def read_mixture(spec: str) -> dict[str, Fraction]:
    """Return the weights, which add to 1, of `0.7*ONE+0.3*OTHER`; of one corpus, nothing."""
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
    """Refuse a dataset that differs from a run's data.json; returns False if that is missing."""
    saved = files.read_sealed(path)
    if saved is None:
        return False
    if saved != dataset.describe():
        raise UserError(
            f"The text or tokenizer is no longer what {path.parent} was trained on",
            "Restore it, or give another --workdir",
        )
    return True
