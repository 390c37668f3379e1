"""Tasks of many small examples: LAMBADA and HellaSwag."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import UserError
from gpt2.evals.report import Figure, mean, perplexity
from gpt2.evals.scoring import Request, Scorer, continuation

_FORMATS = "docs/evaluation.md says what the file holds"


def lambada(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores the last token of each passage, as in the GPT-2 paper."""
    rows = [
        tokenizer.encode(example["text"]).tolist()
        for example in read_jsonl(path, "text")
    ]
    requests = [continuation(row[:-1], row[-1:], scorer.context_length) for row in rows]
    scores = scorer.score(requests, "lambada")
    n = len(requests)
    right = mean([score.greedy for score in scores])
    spread = perplexity(scores)
    how = "the last token, as in the GPT-2 paper"
    return [
        Figure("lambada", "accuracy, last token", *right, n, f"greedy: {how}"),
        Figure("lambada", "perplexity, last token", *spread, n, f"of {how}"),
    ]


def hellaswag(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores which of four endings a model finds likeliest, as llm.c does."""
    examples = list(read_jsonl(path, "ctx", "endings", "label"))
    labels = [str(example["label"]) for example in examples]
    for label in {*labels} - {
        str(i) for i in range(min(len(e["endings"]) for e in examples))
    }:
        raise UserError(
            f"{path} has the label {label!r}", "Use examples whose answers are known"
        )
    requests = [
        after(tokenizer, example["ctx"], f" {ending}", scorer.context_length)
        for example in examples
        for ending in example["endings"]
    ]
    found = iter(scorer.score(requests, "hellaswag"))
    scores = [[next(found) for _ in example["endings"]] for example in examples]
    sums = [[score.log_prob for score in choices] for choices in scores]
    means = [[score.log_prob / score.count for score in choices] for choices in scores]
    figures = []
    for name, values, how in (
        ("acc", sums, "sum"),
        ("acc_norm, llm.c", means, "mean per token"),
    ):
        right = [
            int(np.argmax(v)) == int(label)
            for v, label in zip(values, labels, strict=True)
        ]
        how = f"ending of the highest {how}, context as it is"
        figures.append(Figure("hellaswag", name, *mean(right), len(right), how))
    return figures


def after(
    tokenizer: Tokenizer, context: str, text: str, context_length: int
) -> Request:
    """Returns the request for the likelihood of `text` after `context`.

    Spaces between the two count as part of `text`. The two are tokenised together, so that the text
    has the tokens that it has in place. The number of the context's own tokens tells where it ends.
    """
    stripped = context.rstrip()
    text = context[len(stripped) :] + text
    whole = tokenizer.encode(stripped + text).tolist()
    start = len(tokenizer.encode(stripped))
    if not start and tokenizer.eot is not None:
        whole = [tokenizer.eot, *whole]
        start = 1
    return continuation(whole[:start], whole[start:], context_length)


def read_jsonl(path: Path, *fields: str) -> Iterator[dict[str, Any]]:
    """Reads the fields of one JSON object a line."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                example = json.loads(line)
                yield {name: example[name] for name in fields}
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f"{path}, line {number}: {error!r}", _FORMATS) from None
