"""LAMBADA and HellaSwag, two tasks with many short examples."""

from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data.tokenizer import Tokenizer
from gpt2.evals.figures import Figure, mean, mean_loss
from gpt2.evals.scoring import Request, Scorer, continuation
from gpt2.evals.task_files import read_jsonl, require


def lambada(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Return the accuracy and the perplexity of the last token of each passage in a file.

    This is the convention of the GPT-2 paper. `path` is the path of lambada.jsonl.
    """

    def parse(passage: Any) -> Request:
        # White space at the end of a passage does not belong to the passage.
        row = tokenizer.encode(passage["text"].rstrip())
        return continuation(row[:-1], row[-1:], scorer.context_length)

    scores = scorer.score(read_jsonl(path, parse), "lambada")
    right = mean([score.greedy for score in scores])
    spread = mean_loss(scores).exp()
    convention = "the last token, as in the GPT-2 paper"
    return [
        Figure(
            "lambada", "accuracy, last token", *right, f"greedy choice of {convention}"
        ),
        Figure(
            "lambada", "perplexity, last token", *spread, f"perplexity of {convention}"
        ),
    ]


def hellaswag(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Return how often the most likely of four endings is the correct one, as in llm.c.

    There are two accuracies: the first compares the sums of the log-probabilities of the endings'
    tokens, and the second compares the means. `path` is the path of hellaswag.jsonl.
    """

    def parse(example: Any) -> tuple[int, list[Request]]:
        context = tokenizer.encode(example["ctx"])
        endings = []
        # Without this check, a string would pass as a list of letters.
        require(isinstance(example["endings"], list), "the field endings is not a list")
        require(
            len(example["endings"]) == 4, "the field endings does not have four endings"
        )
        for text in example["endings"]:
            # The ending is encoded together with the context, because some tokenizers would encode
            # it differently at the start of a text.
            row = tokenizer.encode(example["ctx"] + " " + text)
            tokens = row[len(context) :]
            endings.append(continuation(context, tokens, scorer.context_length))
        # This raises an error for the test split, which has no labels.
        label = range(len(endings)).index(int(str(example["label"])))
        return label, endings

    labels, examples = zip(*read_jsonl(path, parse), strict=True)
    scores = np.array(scorer.score_groups(examples, "hellaswag"))
    sums = scores[..., 0]  # log-likelihoods [examples, endings]
    means = sums / scores[..., 1]
    by_sum = mean(sums.argmax(axis=1) == labels)
    by_mean = mean(means.argmax(axis=1) == labels)
    highest = "answer: the ending with the highest"
    return [
        Figure("hellaswag", "acc", *by_sum, f"{highest} sum of log-probabilities"),
        Figure(
            "hellaswag", "acc_norm, llm.c", *by_mean, f"{highest} mean log-probability"
        ),
    ]
