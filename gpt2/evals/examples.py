"""Tasks of many small examples: LAMBADA and HellaSwag."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt2.data.tokenizer import Tokenizer
from gpt2.evals.files import read_jsonl
from gpt2.evals.report import Figure, mean, perplexity
from gpt2.evals.scoring import Request, Scorer, continuation


def lambada(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores the last token of each passage, as in the GPT-2 paper."""
    requests = []
    T = scorer.context_length
    for text in read_jsonl(path, _parse_passage):
        row = tokenizer.encode(text)
        request = continuation(row[:-1], row[-1:], T)
        requests.append(request)
    scores = scorer.score(requests, "lambada")
    right = mean([score.greedy for score in scores])
    spread = perplexity(scores)
    how = "the last token, as in the GPT-2 paper"
    return [
        Figure("lambada", "accuracy, last token", *right, f"greedy: {how}"),
        Figure("lambada", "perplexity, last token", *spread, f"of {how}"),
    ]


def hellaswag(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores which of four endings a model finds likeliest, as llm.c does."""
    examples = read_jsonl(path, _parse_choice)
    requests = []
    T = scorer.context_length
    for example in examples:
        for ending in example.endings:
            requests.append(after(tokenizer, example.context, f" {ending}", T))
    scores = iter(scorer.score(requests, "hellaswag"))
    by_sum = []
    by_mean = []
    for example in examples:
        found = [next(scores) for _ in example.endings]
        sums = [score.log_prob for score in found]
        means = [score.log_prob / score.count for score in found]
        by_sum.append(np.argmax(sums) == example.label)
        by_mean.append(np.argmax(means) == example.label)
    figures = []
    for metric, right, how in (
        ("acc", by_sum, "sum"),
        ("acc_norm, llm.c", by_mean, "mean per token"),
    ):
        how = f"ending of the highest {how}, context as it is"
        figures.append(Figure("hellaswag", metric, *mean(right), how))
    return figures


class Choice(NamedTuple):
    """An example of HellaSwag."""

    context: str
    endings: list[str]
    label: int  # of the right one


def _parse_passage(value: object) -> str | None:
    match value:
        case {"text": str(text)}:
            return text
    return None


def _parse_choice(value: object) -> Choice | None:
    match value:
        case {"ctx": str(context), "endings": [*endings], "label": label}:
            for number in range(len(endings)):
                if str(label) == str(number):
                    return Choice(context, endings, number)
    return None


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
