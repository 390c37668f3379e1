"""CORE, the yardstick of GPT-2: 22 tasks of DCLM (Li et al. 2024, arXiv 2406.11794).

Prompts, few-shot examples and what counts as right are nanochat's, whose figures people compare.
"""

import csv
import math
import random
from collections.abc import Iterator
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from gpt2.data.tokenizer import Tokenizer
from gpt2.evals.examples import read_jsonl
from gpt2.evals.report import Figure, mean
from gpt2.evals.scoring import Request, Scorer, continuation

# The kinds of tasks, and what their examples hold; `gold` is the number of the right alternative.
_FIELDS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}


class Task(NamedTuple):
    """A task of core.yaml with its examples, shuffled."""

    label: str
    kind: str
    num_shots: int  # solved examples before each question
    delimiter: str  # between question and answer
    examples: list[dict[str, Any]]

    def texts(self, example: dict[str, Any]) -> list[str]:
        """Returns each alternative, question and answer in one; or the question, then both."""
        if self.kind == "multiple_choice":
            return [
                f"{example['query']}{self.delimiter}{choice}"
                for choice in example["choices"]
            ]
        answer = f"{self.delimiter}{example['continuation']}"
        if self.kind == "schema":
            return [f"{context}{answer}" for context in example["context_options"]]
        question = example["context"].strip()
        return [f"{question}{self.delimiter}".rstrip(), f"{question}{answer}"]

    def requests(
        self, index: int, tokenizer: Tokenizer, context_length: int
    ) -> Iterator[Request]:
        """Yields what to score of an example: the answer of each alternative."""
        others = random.Random(1234 + index).sample(
            range(len(self.examples) - 1), self.num_shots
        )
        shots = [self.examples[other + (other >= index)] for other in others]
        before = "".join(
            f"{self.texts(shot)[shot.get('gold', -1)]}\n\n" for shot in shots
        )
        start = [] if tokenizer.eot is None else [tokenizer.eot]
        texts = (before + text for text in self.texts(self.examples[index]))
        rows = [[*start, *tokenizer.encode(text).tolist()] for text in texts]
        is_end = (
            self.kind == "schema"
        )  # what rows have in common is the answer, not the question
        shared = len(commonprefix([row[:: -1 if is_end else 1] for row in rows]))  # noqa: RUF071
        lengths = [shared if is_end else len(row) - shared for row in rows]
        if self.kind == "language_modeling":
            del rows[0], lengths[0]  # of the question alone
        for row, length in zip(rows, lengths, strict=True):
            # An answer has a token at least, also one that begins another, and one before it.
            length = min(max(length, 1), len(row) - 1, context_length - 1)
            yield continuation(row[:-length], row[-length:], context_length - 1)

    def solved(self, scorer: Scorer, tokenizer: Tokenizer) -> list[bool]:
        """Returns which examples a model solves."""
        numbers = range(len(self.examples))
        T = scorer.context_length
        requests = [list(self.requests(number, tokenizer, T)) for number in numbers]
        scores = iter(
            scorer.score([each for parts in requests for each in parts], self.label)
        )
        found = [[next(scores) for _ in parts] for parts in requests]
        if self.kind == "language_modeling":
            return [score.greedy for (score,) in found]
        means = [[score.log_prob / score.count for score in scores] for scores in found]
        answers = [example["gold"] for example in self.examples]
        return [
            int(np.argmax(m)) == gold for m, gold in zip(means, answers, strict=True)
        ]


def core(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores the tasks that core.yaml names, and the mean of their centred accuracies."""
    with (path.parent / "eval_meta_data.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        chances = {
            row["Eval Task"]: float(row["Random baseline"])
            for row in csv.DictReader(file)
        }
    figures = list[Figure]()
    centred = list[float]()
    variances = list[float]()
    for task in _read_tasks(path):
        solved = task.solved(scorer, tokenizer)
        chance = chances[task.label] / 100
        value, stderr = mean(solved)
        how = f"accuracy, {task.kind}, {task.num_shots} shots, {100 * chance:g} % by chance"
        figures.append(Figure("core", task.label, value, stderr, len(solved), how))
        centred.append((value - chance) / (1 - chance))
        variances.append((stderr / (1 - chance)) ** 2)
    how = f"mean centred accuracy of {len(figures)} tasks; GPT-2 1558M has 0.2565 over DCLM's 22"
    value = float(np.mean(centred))
    stderr = math.sqrt(sum(variances)) / len(figures)
    number = sum(figure.num_examples for figure in figures)
    return [*figures, Figure("core", "CORE", value, stderr, number, how)]


def _read_tasks(path: Path) -> Iterator[Task]:
    for about in yaml.safe_load(path.read_text("utf-8"))["icl_tasks"]:
        kind = about["icl_task_type"]
        file = path.parent / "eval_data" / about["dataset_uri"]
        examples = list(read_jsonl(file, *_FIELDS[kind]))
        random.Random(1337).shuffle(examples)
        num_shots = about["num_fewshot"][0]
        delimiter = about.get("continuation_delimiter", " ")
        yield Task(about["label"], kind, num_shots, delimiter, examples)
