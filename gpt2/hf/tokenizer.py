"""Tokenizers from and to a Hugging Face directory."""

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from gpt2.config import GPTConfig
from gpt2.data import tokenizer as ours
from gpt2.data.byte_level import END_OF_TEXT, byte_alphabet
from gpt2.errors import UserError

# Multiples to which programs pad a vocabulary, for faster matrix products.
_PADDED_TO = (64, 128)
# Rows that they leave for tokens to come, at most, as a share of the tokens: Qwen 3 has 151,936
# rows for 151,669 tokens, and the largest Pythia 50,688 for 50,277.
_SPARE = 0.01


def load_tokenizer(directory: Path, cfg: GPTConfig) -> ours.Tokenizer:
    """Reads tokenizer.json, or vocab.json and merges.txt; with neither, GPT-2's own if it fits.

    Raises:
        UserError: there is no tokenizer, or the model has another number of tokens. Padding of the
            model's vocabulary is allowed.
    """
    directory = Path(directory)
    tokenizer = _read(directory)
    if tokenizer is None:
        if cfg.vocab_size != ours.GPT2_END_OF_TEXT + 1:
            raise UserError(
                f"{directory} holds no tokenizer",
                "Add the tokenizer.json that the model came with",
            )
        tokenizer = ours.gpt2_tokenizer()
    if not _fits(tokenizer, cfg):
        raise UserError(
            f"the tokenizer of {directory} has {tokenizer.vocab_size} tokens, and the model has "
            f"{cfg.vocab_size}",
            "Put the tokenizer there that the model was trained with",
        )
    return tokenizer


def count_tokens(directory: Path, cfg: GPTConfig) -> int:
    """Returns how many of the model's `cfg.vocab_size` tokens are not padding.

    The directory's tokenizer gives the number. Without one that fits, which `load_tokenizer`
    refuses, all of them count.
    """
    if cfg.vocab_size % min(_PADDED_TO):  # not padded
        return cfg.vocab_size
    try:
        tokenizer = _read(directory)
    except UserError:
        return cfg.vocab_size
    if tokenizer is None or not _fits(tokenizer, cfg):
        return cfg.vocab_size
    return tokenizer.vocab_size


def _fits(tokenizer: ours.Tokenizer, cfg: GPTConfig) -> bool:
    """Returns whether the model has as many tokens as the tokenizer, or those and padding."""
    known, rows = tokenizer.vocab_size, cfg.vocab_size
    padded = (-(-known // multiple) * multiple for multiple in _PADDED_TO)
    is_spare = rows % min(_PADDED_TO) == 0 and known < rows <= known * (1 + _SPARE)
    return rows in (known, *padded) or is_spare


def _read(directory: Path) -> ours.Tokenizer | None:
    """Reads the tokenizer that lies in a directory, if one does."""
    files = [directory / name for name in ("vocab.json", "merges.txt")]
    if (directory / "tokenizer.json").is_file():
        return ours.load(directory / "tokenizer.json")
    if all(file.is_file() for file in files):
        return _from_tree(_byte_level(_read_bpe(files)))
    return None


def _read_bpe(files: list[Path]) -> models.BPE:
    try:
        return models.BPE.from_file(*map(str, files))
    except Exception as error:  # the library raises no narrower kind
        names = " and ".join(file.name for file in files)
        raise UserError(
            f"{files[0].parent}: {names} are not a tokenizer ({error})", "Download both again"
        ) from None


def save_tokenizer(directory: Path, tokenizer: ours.Tokenizer, context_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, as transformers' AutoTokenizer reads them.

    Args:
        directory: where to write.
        tokenizer: any of this project's.
        context_length: of the model, in tokens.
    """
    with tempfile.TemporaryDirectory() as scratch:
        saved = Path(scratch) / "tokenizer.json"
        tokenizer.save(saved)
        tree = json.loads(saved.read_text(encoding="utf-8"))
    match tree:
        case {"kind": "char", "characters": characters, "has_eot": has_eot}:
            tree = _characters(characters, has_eot)
        case {"kind": _}:
            tree = _byte_level(_merges(tokenizer))
    (directory / "tokenizer.json").write_text(json.dumps(tree, ensure_ascii=False), "utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.eot is not None:
        eot = tokenizer.decode([tokenizer.eot])
        config |= {"bos_token": eot, "eos_token": eot, "unk_token": eot}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _byte_level(model: models.BPE) -> dict[str, Any]:
    """Returns the tokenizer.json of GPT-2's kind of tokenizer; end-of-text comes last."""
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return json.loads(backend.to_str())


def _characters(characters: str, has_eot: bool) -> dict[str, Any]:
    """Returns a tokenizer.json with one token for each character."""
    backend = Backend(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token=""))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    if has_eot:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return json.loads(backend.to_str())


def _merges(tokenizer: ours.Tokenizer) -> models.BPE:
    """Returns the merges of a byte-level tokenizer, whose ids grow in their order.

    The last merge of a token joins two parts: those that remain when the token is encoded with
    earlier tokens only.
    """
    tokens = [tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size - 1)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    shown = {byte: char for char, byte in byte_alphabet().items()}

    def text(token: bytes) -> str:
        return "".join(shown[byte] for byte in token)

    merges = []
    for rank, token in enumerate(tokens):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            at = min(range(len(pairs)), key=pairs.__getitem__)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((text(parts[0]), text(parts[1])))
    return models.BPE({text(token): rank for token, rank in ranks.items()}, merges)


def _from_tree(tree: dict[str, Any]) -> ours.Tokenizer:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokenizer.json"
        path.write_text(json.dumps(tree), encoding="utf-8")
        return ours.load(path)
