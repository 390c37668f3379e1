"""Tasks of many small examples: LAMBADA and HellaSwag."""

from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data.tokenizer import Tokenizer
from gpt2.evals.files import read_jsonl
from gpt2.evals.report import Figure, mean, mean_loss
from gpt2.evals.scoring import Request, Scorer, continuation


def lambada(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores the last token of each passage, as in the GPT-2 paper."""

    def parse(passage: Any) -> Request:
        row = tokenizer.encode(passage["text"])
        return continuation(row[:-1], row[-1:], scorer.context_length)

    scores = scorer.score(read_jsonl(path, parse), "lambada")
    right = mean([score.greedy for score in scores])
    spread = mean_loss(scores).exp()
    how = "the last token, as in the GPT-2 paper"
    return [
        Figure("lambada", "accuracy, last token", *right, f"greedy: {how}"),
        Figure("lambada", "perplexity, last token", *spread, f"of {how}"),
    ]


def hellaswag(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores which of four endings a model finds likeliest, as llm.c does."""

    def parse(example: Any) -> tuple[int, list[Request]]:
        context = tokenizer.encode(example["ctx"])
        endings = []
        for text in example["endings"]:
            tokens, _ = tokenizer.encode_part(" " + text, starts=False)
            endings.append(continuation(context, tokens, scorer.context_length))
        # The test split has none.
        label = range(len(endings)).index(int(example["label"]))
        return label, endings

    labels, examples = zip(*read_jsonl(path, parse), strict=True)
    scores = np.array(scorer.score_groups(examples, "hellaswag"))
    sums = scores[..., 0]  # by example and ending
    means = sums / scores[..., 1]
    by_sum = mean(sums.argmax(axis=1) == labels)
    by_mean = mean(means.argmax(axis=1) == labels)
    highest = "ending of the highest"
    return [
        Figure("hellaswag", "acc", *by_sum, f"{highest} sum"),
        Figure("hellaswag", "acc_norm, llm.c", *by_mean, f"{highest} mean"),
    ]
