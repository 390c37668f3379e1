"""CORE, the yardstick of GPT-2: 22 tasks of DCLM (Li et al. 2024, arXiv 2406.11794).

Prompts, few-shot examples and what counts as right are nanochat's, whose figures people compare.
"""

import csv
import math
import random
from functools import partial
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import UserError
from gpt2.evals.files import read_jsonl, read_text, reading
from gpt2.evals.report import Estimate, Figure, mean
from gpt2.evals.scoring import Request, Scorer, continuation


class Example(NamedTuple):
    """A question with its answers."""

    texts: list[str]  # of each alternative; or the question alone, then with its answer
    gold: int  # which of them is right


class Task(NamedTuple):
    """A task of core.yaml with its examples, shuffled."""

    label: str
    kind: str
    num_shots: int  # solved examples before each question
    chance: float  # accuracy of a guess
    examples: list[Example]

    def requests(
        self, index: int, tokenizer: Tokenizer, context_length: int
    ) -> list[Request]:
        """Returns what to score of an example: the answer of each alternative."""
        others = self.examples[:index] + self.examples[index + 1 :]
        rng = random.Random(1234 + index)
        shots = rng.sample(others, self.num_shots)
        before = "".join(f"{shot.texts[shot.gold]}\n\n" for shot in shots)
        start = [] if tokenizer.eot is None else [tokenizer.eot]
        rows = []
        for text in self.examples[index].texts:
            tokens = tokenizer.encode(before + text).tolist()
            rows.append([*start, *tokens])
        first = commonprefix(rows)  # noqa: RUF071
        last = commonprefix([row[::-1] for row in rows])  # noqa: RUF071
        if self.kind == "language_modeling":
            del rows[0]  # the question alone
        requests = []
        for row in rows:
            length = len(row) - len(first)
            if self.kind == "schema":  # whose alternatives have the answer in common
                length = len(last)
            # An answer has a token at least, also one that begins another, and one before it.
            most = context_length - 1
            length = min(max(length, 1), len(row) - 1, most)
            requests.append(continuation(row[:-length], row[-length:], most))
        return requests

    def solved(self, scorer: Scorer, tokenizer: Tokenizer) -> list[bool]:
        """Returns which examples a model solves."""
        requests = []
        for index in range(len(self.examples)):
            own = self.requests(index, tokenizer, scorer.context_length)
            requests.append(own)
        scores = scorer.score_groups(requests, self.label)
        solved = []
        for example, answers in zip(self.examples, scores, strict=True):
            if self.kind == "language_modeling":
                solved.append(answers[0].greedy)
            else:
                means = [score.log_prob / score.count for score in answers]
                solved.append(int(np.argmax(means)) == example.gold)
        return solved


def core(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores the tasks that core.yaml names, and the mean of their centred accuracies."""
    figures = []
    centred = []
    for task in _read_tasks(path):
        solved = task.solved(scorer, tokenizer)
        chance = task.chance
        how = f"accuracy, {task.kind}, {task.num_shots} shots, {100 * chance:g} % by chance"
        figures.append(Figure("core", task.label, *mean(solved), how))
        gains = (np.array(solved) - chance) / (1 - chance)
        centred.append(mean(gains))
    number = len(figures)
    how = f"mean centred accuracy of {number} tasks; GPT-2 1558M has 0.2565 over DCLM's 22"
    values, errors, sizes = zip(*centred, strict=True)
    score = Estimate(sum(values), math.hypot(*errors), sum(sizes))
    figures.append(Figure("core", "CORE", *score.scaled(1 / number), how))
    return figures


def _read_tasks(path: Path) -> list[Task]:
    """Reads all tasks before the first is scored."""
    table = path.parent / "eval_meta_data.csv"
    with reading(table):
        rows = csv.DictReader(read_text(table).splitlines())
        chances = {row["Eval Task"]: float(row["Random baseline"]) for row in rows}
    tasks = []
    with reading(path):
        for about in yaml.safe_load(read_text(path))["icl_tasks"]:
            label = about["label"]
            kind = about["icl_task_type"]
            num_shots = about["num_fewshot"][0]
            chance = chances[label] / 100
            delimiter = about.get("continuation_delimiter", " ")
            file = path.parent / "eval_data" / about["dataset_uri"]
            examples = read_jsonl(file, partial(_parse, kind, delimiter))
            if num_shots >= len(examples):
                what = f"{file} has {len(examples)} examples"
                raise UserError(f"{what}, and each needs {num_shots} others")
            random.Random(1337).shuffle(examples)
            tasks.append(Task(label, kind, num_shots, chance, examples))
    return tasks


def _parse(kind: str, delimiter: str, value: Any) -> Example:
    """Returns an example of a kind of task."""
    if kind == "language_modeling":
        question = value["context"].strip() + delimiter
        return Example([question.rstrip(), question + value["continuation"]], gold=1)
    if kind == "multiple_choice":
        texts = [value["query"] + delimiter + choice for choice in value["choices"]]
    else:  # schema
        end = delimiter + value["continuation"]
        texts = [context + end for context in value["context_options"]]
    return Example(texts, range(len(texts)).index(value["gold"]))
