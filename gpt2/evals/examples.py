"""Tasks of many small examples: LAMBADA and HellaSwag."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt2.data.tokenizer import Tokenizer
from gpt2.evals.files import read_jsonl
from gpt2.evals.report import Figure, mean, perplexity
from gpt2.evals.scoring import Scorer, continuation


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
        context = tokenizer.encode(example.context)
        for ending in example.endings:
            tokens, _ = tokenizer.encode_part(ending, starts=False)
            requests.append(continuation(context, tokens, T))
    scores = iter(scorer.score(requests, "hellaswag"))
    by_sum = []
    by_mean = []
    for example in examples:
        found = [next(scores) for _ in example.endings]
        sums = [score.log_prob for score in found]
        means = [score.log_prob / score.count for score in found]
        by_sum.append(np.argmax(sums) == example.label)
        by_mean.append(np.argmax(means) == example.label)
    highest = "ending of the highest"
    return [
        Figure("hellaswag", "acc", *mean(by_sum), f"{highest} sum"),
        Figure("hellaswag", "acc_norm, llm.c", *mean(by_mean), f"{highest} mean"),
    ]


class Choice(NamedTuple):
    """An example of HellaSwag."""

    context: str
    endings: list[str]  # with the space before each
    label: int  # of the right one


def _parse_passage(value: object) -> str | None:
    match value:
        case {"text": str(text)}:
            return text
    return None


def _parse_choice(value: object) -> Choice | None:
    match value:
        case {"ctx": str(context), "endings": [_, _, *_] as endings, "label": label}:
            texts = [" " + ending for ending in endings]
            for number in range(len(endings)):
                if str(label) == str(number):
                    return Choice(context, texts, number)
    return None
