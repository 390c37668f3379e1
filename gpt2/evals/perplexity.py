"""Perplexity and bits per byte of WikiText, enwik8, text8 and the validation split of a corpus."""

import codecs
import math
import re
from pathlib import Path

from gpt2.config import DataConfig
from gpt2.data import prepare_dataset
from gpt2.data.datasets import Recorded
from gpt2.data.loading.token_batches import ValidationLoader
from gpt2.data.tokenizer import Tokenizer, fingerprint
from gpt2.errors import UserError
from gpt2.evals.figures import Figure, mean_loss
from gpt2.evals.scoring import Request, Score, Scorer, windows
from gpt2.evals.task_files import read_text, reading, require


def validation(
    scorer: Scorer, tokenizer: Tokenizer, data: DataConfig, recorded: Recorded
) -> list[Figure]:
    """Return the loss, perplexity and bits per byte of the validation split of `data.corpus`.

    The windows are the same as in the validations of a run. Each corpus of a mixture is scored
    separately. `data` and `recorded` are the result of `validation_data`. Bits per byte are left
    out if the tokens do not preserve the text.
    """
    dataset = prepare_dataset(data, recorded)
    if not dataset.parts:
        raise UserError(
            f"The corpus {data.corpus} yields batches, but only a text can be scored",
            "Give a text with --corpus=text:FILE, or choose other --tasks",
        )
    if fingerprint(dataset.tokenizer) != fingerprint(tokenizer):
        raise UserError(
            f"The corpus {data.corpus} has tokens of the tokenizer {dataset.tokenizer.name}, "
            f"but the model was trained with the tokenizer {tokenizer.name}",
            "Give a text with --corpus=text:FILE",
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
        for batch in loader.batches():
            window = {key: rows[0] for key, rows in batch.items()}
            requests.append(Request(**window))
        scores = scorer.score(requests, "validation")
        loss = mean_loss(scores)
        task = f"validation {name}".strip()
        convention = (
            f"validation split of {name or data.corpus} (val_fraction="
            f"{data.val_fraction:g}); windows of {scorer.context_length} tokens that do not overlap"
        )
        if data.document_mask:
            convention += "; attention within documents"
        figures += [
            Figure(task, "loss (nats per token)", *loss, convention),
            Figure(task, "perplexity per token", *loss.exp(), convention),
        ]
        if part.bytes_per_target is not None:
            bits = loss.scaled(1 / part.bytes_per_target / math.log(2.0))
            figures.append(Figure(task, "bits per byte", *bits, convention))
    return figures


def wikitext(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Return the perplexity per token and the perplexity per word of a file of raw WikiText.

    The perplexity per token is computed on the unchanged text, and the perplexity per word on the
    text that `detokenize` returns.
    """
    text = read_text(path)
    plain = detokenize(text)
    scores = _score(scorer, tokenizer, text, "wikitext tokens")
    by_token = mean_loss(scores).exp()
    scores = _score(scorer, tokenizer, plain, "wikitext words")
    by_word = mean_loss(scores, len(text.split())).exp()
    context = f"windows of {scorer.context_length} tokens, stride {scorer.stride}"
    token = f"unchanged text; {context}"
    word = f"detokenized text, per whitespace-separated word of the original; {context}"
    return [
        Figure("wikitext", "perplexity per token", *by_token, token),
        Figure("wikitext", "perplexity per word", *by_word, word),
    ]


# Bytes that continue a character in UTF-8. A part that was cut from a larger file may begin with
# such bytes.
_CONTINUED = bytes(range(0x80, 0xC0))


def compression(scorer: Scorer, tokenizer: Tokenizer, path: Path) -> list[Figure]:
    """Return the bits per byte of a file such as enwik8 or text8."""
    with reading(path):
        content = path.read_bytes().lstrip(_CONTINUED)
        # An incremental decoder drops a character that is cut off at the end of the file.
        text = codecs.getincrementaldecoder("utf-8")().decode(content)
        require(text, "the file is empty")
    task = path.name
    scores = _score(scorer, tokenizer, text, task)
    bits = mean_loss(scores, len(text.encode())).scaled(1 / math.log(2.0))
    context = f"windows of {scorer.context_length} tokens, stride {scorer.stride}"
    return [Figure(task, "bits per byte", *bits, f"whole file; {context}")]


def _score(scorer: Scorer, tokenizer: Tokenizer, text: str, label: str) -> list[Score]:
    """Return the scores of windows over a text, which together score each token once.

    The first token of a text cannot be scored, because it has no context. If the tokenizer has an
    end-of-text token, it is therefore put before the text. `label` names the text in the progress
    bar. Raise a UserError if the tokens do not preserve the text.
    """
    encoded, lost = tokenizer.encode_counting(text)
    if lost:
        raise UserError(
            f"The tokenizer {tokenizer.name} cannot encode {lost:,} bytes of the text, so the score"
            " would not include all of it",
            "Score a model whose tokenizer can encode all characters",
        )
    tokens = encoded.tolist()
    if tokenizer.eot is not None:
        tokens.insert(0, tokenizer.eot)
    requests = windows(tokens, scorer.context_length, scorer.stride)
    return scorer.score(requests, label)


# Replacements that undo the tokenization of WikiText, in this order.
_DETOKENIZE = (
    (r" @([-,.])@ ", r"\1"),  # punctuation within numbers and compound words
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
    """Return WikiText with its tokenization undone, as in the GPT-2 paper (section 3.1).

    For example, WikiText has spaces around punctuation, and ` @-@ ` for a hyphen.
    """
    for pattern, replacement in _DETOKENIZE:
        text = re.sub(pattern, replacement, text)
    return text
