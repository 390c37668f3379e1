"""CORE, the mean score of 22 tasks of DCLM (Li et al. 2024, arXiv 2406.11794).

Prompts, few-shot examples and the rule for a correct answer are the same as in nanochat, so that
scores can be compared with nanochat's.
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
from gpt2.evals.figures import Estimate, Figure, mean
from gpt2.evals.scoring import Request, Scorer, continuation
from gpt2.evals.task_files import read_jsonl, read_text, reading, require

KINDS = ("multiple_choice", "schema", "language_modeling")


class Example(NamedTuple):
    """A question with its alternative answers."""

    # The question with each alternative. For language_modeling, these are the question without and
    # with its answer.
    texts: list[str]
    gold: int  # index of the correct text


class Task(NamedTuple):
    """A task in core.yaml, with its shuffled examples."""

    label: str
    kind: str
    num_shots: int  # number of solved examples before each question
    chance: float  # accuracy of random guessing, from 0 to 1
    examples: list[Example]

    def requests(
        self, index: int, tokenizer: Tokenizer, context_length: int
    ) -> list[Request]:
        """Return the requests that score the example `examples[index]`.

        There is one request for each alternative answer. A task of the kind `language_modeling` has
        no alternatives: an example has a single request, which scores the correct answer.
        """
        others = self.examples[:index] + self.examples[index + 1 :]
        rng = random.Random(1234 + index)  # nanochat's seed
        shots = rng.sample(others, self.num_shots)
        solved = [f"{shot.texts[shot.gold]}\n\n" for shot in shots]
        before = "".join(solved)
        start = [] if tokenizer.eot is None else [tokenizer.eot]
        rows = []
        for text in self.examples[index].texts:
            tokens = tokenizer.encode(before + text).tolist()
            rows.append([*start, *tokens])
        first = commonprefix(rows)  # noqa: RUF071
        last = commonprefix([row[::-1] for row in rows])  # noqa: RUF071
        if self.kind == "language_modeling":
            del rows[0]  # this row only shows where the answer begins
        requests = []
        for row in rows:
            length = len(row) - len(first)
            if self.kind == "schema":
                # The alternatives of a schema differ in the question and end with the same answer.
                length = len(last)
            # At least one token is scored, even if this answer is the beginning of another answer.
            # At least one token precedes the scored tokens.
            most = context_length - 1
            length = min(max(length, 1), len(row) - 1, most)
            requests.append(continuation(row[:-length], row[-length:], most))
        return requests

    def solved(self, scorer: Scorer, tokenizer: Tokenizer) -> list[bool]:
        """Return a list with an element for each example: whether the model solves it."""
        requests = []
        for index in range(len(self.examples)):
            with reading(f"An example of the CORE task {self.label}"):
                group = self.requests(index, tokenizer, scorer.context_length)
            requests.append(group)
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
    """Return the accuracy of each task, and then CORE, the mean of the tasks' centered accuracies.

    `path` is the path of core.yaml, which lists the tasks. A centered accuracy is 0 for random
    guessing, and 1 if the model solves every example.
    """
    figures = []
    centered = []
    for task in _read_tasks(path):
        solved = task.solved(scorer, tokenizer)
        chance = task.chance
        convention = f"accuracy, {task.kind}, {task.num_shots} shots, {100 * chance:g} % by chance"
        figures.append(Figure("core", task.label, *mean(solved), convention))
        # The mean of these gains is the centered accuracy of the task.
        gains = (np.array(solved) - chance) / (1 - chance)
        centered.append(mean(gains))
    number = len(figures)
    convention = (
        f"mean centered accuracy of {number} tasks; "
        "GPT-2 1558M has 0.2565 over the 22 tasks of DCLM"
    )
    values, errors, sizes = zip(*centered, strict=True)
    score = Estimate(sum(values), math.hypot(*errors), sum(sizes))
    figures.append(Figure("core", "CORE", *score.scaled(1 / number), convention))
    return figures


def _read_tasks(path: Path) -> list[Task]:
    """Return all tasks in core.yaml, with their examples.

    Raise a UserError if core.yaml, or any other file of the tasks, has a mistake. Mistakes are
    therefore reported before the first task is scored.
    """
    chances = _read_chances(path.parent / "eval_meta_data.csv")
    tasks = dict[str, Task]()
    with reading(path):
        for entry in yaml.safe_load(read_text(path))["icl_tasks"]:
            label = entry["label"]
            kind = entry["icl_task_type"]
            num_shots = entry["num_fewshot"][0]
            delimiter = entry.get("continuation_delimiter", " ")
            require(label not in tasks, f"the task {label} is listed twice")
            require(
                label in chances, f"eval_meta_data.csv has no row for the task {label}"
            )
            require(kind in KINDS, f"icl_task_type={kind} is not one of {KINDS}")
            require(
                type(num_shots) is int and num_shots >= 0,
                f"num_fewshot={num_shots} of {label} is not a whole number of at least 0",
            )
            file = path.parent / "eval_data" / entry["dataset_uri"]
            examples = read_jsonl(file, partial(_parse, kind, delimiter))
            require(
                num_shots < len(examples),
                f"num_fewshot={num_shots} of {label} must be below {len(examples)}, the number of "
                f"examples in {file}, because a prompt contains other examples of this file",
            )
            # This is nanochat's seed. The order of the examples determines which of them become the
            # few-shot examples of a prompt.
            random.Random(1337).shuffle(examples)
            tasks[label] = Task(label, kind, num_shots, chances[label], examples)
        require(tasks, "the list icl_tasks is empty")
    return list(tasks.values())


def _read_chances(path: Path) -> dict[str, float]:
    """Return a dict from each task in DCLM's CSV table to the accuracy of random guessing.

    The accuracies are fractions. `path` is the path of eval_meta_data.csv.
    """
    chances = dict[str, float]()
    with reading(path):
        for row in csv.DictReader(read_text(path).splitlines()):
            percent = float(row["Random baseline"])
            # A number between 0 and 1 is probably a fraction, but the table has percentages. If
            # chance were 100 %, no model could be better. NaN fails both comparisons.
            require(
                percent == 0 or 1 <= percent < 100,
                f"Random baseline={percent:g} is neither 0 nor a percentage from 1 to below 100",
            )
            chances[row["Eval Task"]] = percent / 100
    return chances


def _parse(kind: str, delimiter: str, row: Any) -> Example:
    """Return the example in `row`, an object from the JSON Lines file of a task.

    `kind` is one of `KINDS`. `delimiter` is inserted between the question and the answer.
    """
    if kind == "language_modeling":
        question = row["context"].strip() + delimiter
        answer = row["continuation"]
        require(answer, "the field `continuation` is empty")
        return Example([question.rstrip(), question + answer], gold=1)
    if kind == "multiple_choice":
        field = "choices"
        before, after = row["query"] + delimiter, ""
    else:
        field = "context_options"
        before, after = "", delimiter + row["continuation"]
        require(row["continuation"], "the field `continuation` is empty")
    # Without these checks, a string would pass as a list of letters, and `true` as an index.
    alternatives = row[field]
    require(isinstance(alternatives, list), f"the field {field} is not a list")
    require(len({*alternatives}) > 1, f"all texts in the field {field} are the same")
    gold = row["gold"]
    require(
        type(gold) is int and 0 <= gold < len(alternatives),
        f"gold={gold} is not an index of the {len(alternatives)} texts in the field {field}",
    )
    texts = [before + alternative + after for alternative in alternatives]
    return Example(texts, gold)
