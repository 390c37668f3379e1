"""Tasks of many small examples: LAMBADA, HellaSwag and the Children's Book Test."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import UserError
from gpt2.evals.report import Figure, mean, perplexity
from gpt2.evals.scoring import Request, Score, Scorer, continuation

_FORMATS = "docs/evaluation.md says what the file holds"


def lambada(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores the end of each passage: its last token, and its last word."""
    T = scorer.context_length
    by_token, by_word = [], []
    for example in read_jsonl(path, "text"):
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
        right, spread = mean([score.greedy for score in scores]), perplexity(scores, np.ones(n))
        figures += [
            Figure("lambada", f"accuracy, {name}", *right, n, f"greedy: {how}"),
            Figure("lambada", f"perplexity, {name}", *spread, n, f"of {how}"),
        ]
    return figures


def hellaswag(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores which of four endings a model finds likeliest, in the two customary ways."""
    fields = ("ctx", "ctx_a", "ctx_b", "activity_label", "endings", "label")
    examples = list(read_jsonl(path, *fields))
    plain = [(example["ctx"], example["endings"]) for example in examples]
    cleaned = [
        (
            _clean(f"{e['activity_label']}: {e['ctx_a']} {e['ctx_b'].capitalize()}"),
            [_clean(ending) for ending in e["endings"]],
        )
        for e in examples
    ]
    labels = [str(example["label"]) for example in examples]
    for label in set(labels) - {str(i) for i in range(min(len(ends) for _, ends in plain))}:
        raise UserError(f"{path} has the label {label!r}", "Use examples whose answers are known")
    by_plain = _score_choices(scorer, tokenizer, plain, "hellaswag (llm.c)")
    by_cleaned = _score_choices(scorer, tokenizer, cleaned, "hellaswag (harness)")
    per_token = [[score.log_prob / score.count for score in scores] for scores in by_plain]
    per_character = [
        [score.log_prob / len(ending) for score, ending in zip(scores, endings, strict=True)]
        for scores, (_, endings) in zip(by_cleaned, cleaned, strict=True)
    ]
    as_it_is = "context as it is"
    harness = "activity label before the context, brackets removed, as lm-evaluation-harness does"
    ways = (
        ("acc", f"ending of the highest sum, {as_it_is}", _sums(by_plain)),
        ("acc_norm, llm.c", f"ending of the lowest loss per token, {as_it_is}", per_token),
        ("acc, harness", f"ending of the highest sum; {harness}", _sums(by_cleaned)),
        ("acc_norm, harness", f"ending of the highest sum per character; {harness}", per_character),
    )
    answers = [int(label) for label in labels]
    return [_accuracy("hellaswag", name, how, values, answers) for name, how, values in ways]


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


def read_jsonl(path: Path, *fields: str) -> Iterator[dict[str, Any]]:
    """Reads the fields of one JSON object a line."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                example = json.loads(line)
                yield {name: example[name] for name in fields}
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f"{path}, line {number}: {error!r}", _FORMATS) from None


def read_cbt(path: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """Reads the Children's Book Test: context, question with XXXXX, answer, candidates."""
    blocks = re.split(r"\n\s*\n", path.read_text(encoding="utf-8").strip())
    for number, block in enumerate(blocks, 1):
        *sentences, last = (line.partition(" ")[2] for line in block.splitlines() or [""])
        fields = [field for field in last.split("\t") if field]
        if len(fields) != 3 or fields[1] not in fields[2].split("|") or "XXXXX" not in fields[0]:
            raise UserError(f"{path}: block {number} is not a question", _FORMATS)
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
