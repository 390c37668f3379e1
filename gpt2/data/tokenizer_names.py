"""What `data.tokenizer` may say, and the tokenizer that it names."""

import hashlib
import itertools
from collections.abc import Iterable
from pathlib import Path

from gpt2.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    gpt2_tokenizer,
    load,
    train_bpe,
)
from gpt2.errors import UserError

NAMES = ("gpt2", "byte", "char")


def is_path(spec: str) -> bool:
    """Returns whether `data.tokenizer` gives the path of a tokenizer, not a name."""
    return spec not in NAMES and not spec.startswith("bpe:")


def check_spec(spec: str) -> str:
    """Returns a string that changes whenever the tokenizer that `spec` names does.

    Raises:
        UserError: there is no such tokenizer.
    """
    if spec in NAMES:
        return spec
    if spec.startswith("bpe:"):
        size = spec.removeprefix("bpe:")
        if not size.isdecimal() or not 257 <= int(size) <= 1_000_000:
            raise UserError(
                f"data.tokenizer={spec!r} does not give a possible vocabulary size",
                "For example, use --config.data.tokenizer=bpe:4096; a size is from 257 (256 bytes "
                "and end-of-text) to 1000000",
            )
        return spec
    if not Path(spec).is_file():
        raise UserError(
            f"data.tokenizer={spec!r} is neither a tokenizer nor a file",
            "For example, use --config.data.tokenizer=gpt2; byte, char, bpe:SIZE and the path of a "
            "tokenizer.json do too",
        )
    return hashlib.sha256(Path(spec).read_bytes()).hexdigest()


def build(spec: str, texts: Iterable[str] = (), *, many_documents: bool = True) -> Tokenizer:
    """Makes the tokenizer that an option names.

    Args:
        spec: `gpt2`, `byte`, `char`, `bpe:SIZE`, or a path to a tokenizer.json.
        texts: for `char`, the whole corpus, whose characters it takes; for `bpe:SIZE`, the training
            split, on which it is trained.
        many_documents: whether `char` needs an end-of-text token between documents.

    Raises:
        UserError: there is no such tokenizer, or its file cannot be used.
    """
    check_spec(spec)
    if spec == "gpt2":
        return gpt2_tokenizer()
    if spec == "byte":
        return ByteTokenizer()
    if spec == "char":
        characters = set(itertools.chain.from_iterable(texts))
        return CharTokenizer("".join(sorted(characters)), has_eot=many_documents)
    if spec.startswith("bpe:"):
        return train_bpe(int(spec.removeprefix("bpe:")), texts)
    return load(Path(spec))


def tokens_by_name(spec: str) -> int:
    """Returns how many tokens a name of a tokenizer promises (`bpe:SIZE`: at most); 0: unknown."""
    name, _, size = spec.partition(":")
    return {"gpt2": 50257, "byte": 257, "bpe": int(size) if size.isdigit() else 0}.get(name, 0)
