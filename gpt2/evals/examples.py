"""Tasks of many small examples: LAMBADA, HellaSwag and the Children's Book Test."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import MALFORMED, UserError
from gpt2.evals.report import Figure, mean, perplexity
from gpt2.evals.scoring import Request, Score, Scorer, continuation


def lambada(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores the end of each passage: its last token, and its last word."""
    T = scorer.context_length
    by_token, by_word = [], []
    for example in read_jsonl(path, text=is_filled):
        tokens = tokenizer.encode(example["text"]).tolist()
        by_token.append(continuation(tokens[:-1], tokens[-1:], T))
        passage, _, word = example["text"].rpartition(" ")
        by_word.append(after(tokenizer, passage, f" {word}", T))
    figures = []
    for requests, name, how in (
        (by_token, "last token", "the last token, as in the GPT-2 paper"),
        (by_word, "last word", "all tokens of the last word, as lambada_openai does"),
    ):
        scores, n = scorer.score(requests, f"lambada, {name}"), len(requests)
        right = [score.greedy for score in scores]
        figures += [
            Figure("lambada", f"accuracy, {name}", *mean(right), n, f"greedy: {how}"),
            Figure(
                "lambada", f"perplexity, {name}", *perplexity(scores, np.ones(n)), n, f"of {how}"
            ),
        ]
    return figures


def hellaswag(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores which of four endings a model finds likeliest, in the two customary ways."""
    fields: dict[str, Callable[[Any], bool]] = {
        **dict.fromkeys(("ctx", "ctx_a", "activity_label"), is_filled),
        "ctx_b": lambda value: isinstance(value, str),  # WikiHow's rows begin no second sentence
        "endings": lambda value: isinstance(value, list) and all(map(is_filled, value)),
        "label": lambda value: True,  # looked at below
    }
    examples = list(read_jsonl(path, **fields))
    labels = []
    for number, example in enumerate(examples, 1):
        label, num_endings = str(example["label"]), len(example["endings"])
        if label not in map(str, range(num_endings)):
            raise UserError(
                f"{path}, line {number}: label {label!r} is not from 0 to {num_endings - 1}",
                "Give examples whose answers are known, as hellaswag_val.jsonl holds",
            )
        labels.append(int(label))
    plain = [(example["ctx"], example["endings"]) for example in examples]
    cleaned = [
        (
            _clean(f"{e['activity_label']}: {e['ctx_a']} {e['ctx_b'].capitalize()}"),
            [_clean(ending) for ending in e["endings"]],
        )
        for e in examples
    ]
    plain_scores = _score_choices(scorer, tokenizer, plain, "hellaswag (llm.c)")
    cleaned_scores = _score_choices(scorer, tokenizer, cleaned, "hellaswag (harness)")
    harness = "activity label before the context, brackets removed, as lm-evaluation-harness does"
    ways = (
        ("acc", "ending of the highest sum, context as it is", _sums(plain_scores)),
        (
            "acc_norm, llm.c",
            "ending of the lowest loss per token, context as it is",
            [[s.log_prob / s.count for s in scores] for scores in plain_scores],
        ),
        ("acc, harness", f"ending of the highest sum; {harness}", _sums(cleaned_scores)),
        (
            "acc_norm, harness",
            f"ending of the highest sum per character; {harness}",
            [
                [s.log_prob / len(ending) for s, ending in zip(scores, endings, strict=True)]
                for scores, (_, endings) in zip(cleaned_scores, cleaned, strict=True)
            ],
        ),
    )
    return [_accuracy("hellaswag", name, how, values, labels) for name, how, values in ways]


def cbt(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores which of ten words fills the gap in the 21st sentence."""
    questions, labels = [], []
    for context, question, answer, candidates in read_cbt(path):
        before, _, rest = question.partition("XXXXX")
        start = f"{context} {before}".rstrip()
        questions.append((start, [f"{candidate}{rest}" for candidate in candidates]))
        labels.append(candidates.index(answer))
    scores = _score_choices(scorer, tokenizer, questions, "cbt")
    how = "highest likelihood of word and rest of the sentence, as in the GPT-2 paper"
    return [_accuracy("cbt", "accuracy", how, _sums(scores), labels)]


def after(tokenizer: Tokenizer, context: str, text: str, context_length: int) -> Request:
    """Returns the request for the likelihood of `text` after `context`.

    Spaces between the two count as part of `text`. The two are tokenised together, so that the text
    has the tokens that it has in place. The number of the context's own tokens tells where it ends.
    """
    stripped = context.rstrip()
    text = context[len(stripped) :] + text
    whole = tokenizer.encode(stripped + text).tolist()
    start = len(tokenizer.encode(stripped))
    if not start and tokenizer.eot is not None:
        whole, start = [tokenizer.eot, *whole], 1
    return continuation(whole[:start], whole[start:], context_length)


def read_jsonl(path: Path, **fields: Callable[[Any], bool]) -> Iterator[dict[str, Any]]:
    """Reads one JSON object a line.

    Args:
        path: of the file.
        fields: what each object holds, by name: whether a value will do.

    Raises:
        UserError: a line is not an object, or lacks one of `fields`.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                example = json.loads(line)
                wrong = [name for name, will_do in fields.items() if not will_do(example[name])]
            except KeyError as error:
                raise UserError(
                    f"{path}, line {number} has no field {error}", "See docs/evaluation.md"
                ) from None
            except MALFORMED as error:
                raise UserError(
                    f"{path}, line {number}: {error}", "See docs/evaluation.md"
                ) from None
            if wrong:
                raise UserError(
                    f"{path}, line {number}: {wrong[0]}={example[wrong[0]]!r} is no value for it",
                    "See docs/evaluation.md",
                )
            yield example


def is_filled(value: Any) -> bool:
    """Returns whether a value is a text that is not empty."""
    return isinstance(value, str) and value != ""


def read_cbt(path: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """Reads the Children's Book Test: context, question with XXXXX, answer, candidates.

    Raises:
        UserError: a block is not of 20 numbered sentences and a question.
    """
    blocks = re.split(r"\n\s*\n", path.read_text(encoding="utf-8").strip())
    for number, block in enumerate(blocks, 1):
        *sentences, last = (line.partition(" ")[2] for line in block.splitlines() or [""])
        fields = [field for field in last.split("\t") if field]
        if len(fields) != 3 or fields[1] not in fields[2].split("|") or "XXXXX" not in fields[0]:
            raise UserError(f"{path}: block {number} is not a question", "See docs/evaluation.md")
        yield " ".join(sentences), fields[0], fields[1], fields[2].split("|")


def _clean(text: str) -> str:
    """Removes WikiHow's marks, as lm-evaluation-harness does."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _score_choices(
    scorer: Scorer, tokenizer: Tokenizer, examples: Sequence[tuple[str, list[str]]], label: str
) -> list[list[Score]]:
    """Scores every choice of each (context, choices) after its context and a space."""
    T = scorer.context_length
    requests = [
        after(tokenizer, context, f" {choice}", T)
        for context, choices in examples
        for choice in choices
    ]
    scores = iter(scorer.score(requests, label))
    return [[next(scores) for _ in choices] for _, choices in examples]


def _sums(scores: list[list[Score]]) -> list[list[float]]:
    return [[score.log_prob for score in choices] for choices in scores]


def _accuracy(
    task: str, name: str, how: str, values: list[list[float]], labels: list[int]
) -> Figure:
    right = [int(np.argmax(v)) == label for v, label in zip(values, labels, strict=True)]
    return Figure(task, name, *mean(right), len(right), how)
