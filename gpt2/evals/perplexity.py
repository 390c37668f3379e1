"""How well a model predicts text: WikiText, enwik8, text8 and a corpus' validation split."""

import codecs
import math
import re
from pathlib import Path

from gpt2.config import DataConfig
from gpt2.data import prepare
from gpt2.data.loader import ValidationLoader
from gpt2.data.tokenizer import Tokenizer, fingerprint
from gpt2.errors import UserError
from gpt2.evals.files import read_text, reading
from gpt2.evals.report import Figure, mean_loss
from gpt2.evals.scoring import Request, Score, Scorer, windows


def validation(scorer: Scorer, tokenizer: Tokenizer, data: DataConfig) -> list[Figure]:
    """Scores the validation split of a corpus, just as training does, of a mixture by part."""
    dataset = prepare(data)
    if dataset.own:
        how = "Name a text, --corpus=text:FILE, or other --tasks"
        raise UserError(f"{data.corpus} gives batches, and no text to score", how)
    if fingerprint(dataset.tokenizer) != fingerprint(tokenizer):
        raise UserError(
            f"{data.corpus} holds tokens of {dataset.tokenizer.name}, not of {tokenizer.name}"
        )
    figures: list[Figure] = []
    for name, (_, part) in dataset.parts.items():
        loader = ValidationLoader(
            part,
            batch_size=1,
            context_length=scorer.context_length,
            document_mask=data.document_mask,
        )
        requests = []
        for index in range(1, len(loader) + 1):
            batch = loader.batch(index)
            window = {key: rows[0] for key, rows in batch.items()}
            requests.append(Request(**window))
        scores = scorer.score(requests, "validation")
        loss = mean_loss(scores)
        task = f"validation {name}".strip()
        convention = (
            f"validation split of {name or data.corpus}; "
            f"windows of {scorer.context_length} tokens, none overlapping"
        )
        figures += [
            Figure(task, "loss (nats per token)", *loss, convention),
            Figure(task, "perplexity per token", *loss.exp(), convention),
        ]
        if part.targets_per_byte is not None:
            bits = loss.scaled(part.targets_per_byte / math.log(2.0))
            figures.append(Figure(task, "bits per byte", *bits, convention))
    return figures


def wikitext(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores the text of WikiText (the `raw` release, one file), by token and by word."""
    text = read_text(path)
    plain = detokenize(text)
    scores = _score(scorer, tokenizer, text, "wikitext tokens")
    by_token = mean_loss(scores).exp()
    scores = _score(scorer, tokenizer, plain, "wikitext words")
    by_word = mean_loss(scores, len(text.split())).exp()
    context = f"windows of {scorer.context_length} tokens, stride {scorer.stride}"
    token = f"text as it is; {context}"
    word = f"detokenised text, per whitespace-separated word of the original; {context}"
    return [
        Figure("wikitext", "perplexity per token", *by_token, token),
        Figure("wikitext", "perplexity per word", *by_word, word),
    ]


# Bytes of UTF-8 that begin no character: a file that is a part of another may begin within one.
_CONTINUED = bytes(range(0x80, 0xC0))


def compression(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Scores a file in bits per byte, as enwik8 and text8 are."""
    with reading(path):
        content = path.read_bytes().lstrip(_CONTINUED)
        # It leaves out a character that the file's end has cut.
        text = codecs.getincrementaldecoder("utf-8")().decode(content)
    _, lost = tokenizer.encode_part(text, starts=True)
    if lost:
        raise UserError(
            f"{lost:,} bytes of {path} are unknown to {tokenizer.name}, or altered by it"
        )
    task = path.name
    scores = _score(scorer, tokenizer, text, task)
    bits = mean_loss(scores, len(text.encode())).scaled(1 / math.log(2.0))
    context = f"windows of {scorer.context_length} tokens, stride {scorer.stride}"
    return [Figure(task, "bits per byte", *bits, f"whole file; {context}")]


def _score(scorer: Scorer, tokenizer: Tokenizer, text: str, label: str) -> list[Score]:
    """Scores windows over a text. An end-of-text token, if there is one, comes before it.

    Every token of the text is then scored.
    """
    tokens = tokenizer.encode(text).tolist()
    if tokenizer.eot is not None:
        tokens.insert(0, tokenizer.eot)
    requests = windows(tokens, scorer.context_length, scorer.stride)
    return scorer.score(requests, label)


# WikiText's tokenisation undone, in this order: pattern -> replacement.
_DETOKENIZE = (
    (r" @([-,.])@ ", r"\1"),  # marks within numbers and compounds
    (r" ([:;.!?,]) ", r"\1 "),
    (r"([(\[{]) ", r"\1"),
    (r" ([)\]}])", r"\1"),
    (r'" ([^"\n]*?) "', r'"\1"'),
    (r" '(s|t|re|ve|ll|d|m)\b", r"'\1"),
    (r"s ' ", "s' "),
    (r"= (?==)", "="),
    (r" *\n *", "\n"),
)


def detokenize(text: str) -> str:
    """Undoes WikiText's tokenisation, as the GPT-2 paper does (section 3.1)."""
    for pattern, replacement in _DETOKENIZE:
        text = re.sub(pattern, replacement, text)
    return text
