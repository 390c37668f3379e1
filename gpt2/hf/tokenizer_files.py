"""Read and write the tokenizer of a Hugging Face directory."""

import json
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
    """Return the tokenizer in a directory. Raise a UserError unless it fits the model `cfg`.

    The model's embedding may have a few more rows than the tokenizer has tokens: many models pad
    the vocabulary to a multiple of 64 or 128 for faster matrix products, or reserve rows for new
    tokens. Qwen 3 has 151,936 rows for 151,669 tokens, and Pythia has 50,688 rows for 50,277
    tokens.
    """
    path = Path(directory) / "tokenizer.json"
    rows = cfg.vocab_size
    if path.is_file():
        tokenizer = ours.load(path)
        known = tokenizer.vocab_size
        pads = rows % 64 == 0 and known < rows < known + max(128, known / 100)
        if rows == known or pads:
            return tokenizer
    raise UserError(
        f"{directory} has no tokenizer.json whose vocabulary fits the {rows} rows of the model's "
        "embedding",
        "Add the tokenizer.json that AutoTokenizer's save_pretrained writes",
    )


def save_tokenizer(
    directory: Path, tokenizer: ours.Tokenizer, context_length: int
) -> None:
    """Write tokenizer.json and tokenizer_config.json for the AutoTokenizer of transformers.

    `context_length` is the largest number of tokens that the model reads.
    """
    tree = _to_tree(tokenizer)
    template = tree.get("post_processor")
    if template and template["type"] != "ByteLevel":
        # Training never adds the tokens of a template, so their embeddings may be untrained.
        tree["post_processor"] = None
        warn(
            "the exported tokenizer.json has no post_processor, because training did not add the "
            "special tokens that the tokenizer's post_processor would add to each text"
        )
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


def _to_tree(tokenizer: ours.Tokenizer) -> Json:
    """Return the content of a tokenizer.json that encodes in the same way as `tokenizer`."""
    # This is the tokenizer `byte`, which has no merges. Other kinds replace parts of it.
    backend = Backend(models.BPE(byte_alphabet(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    match tokenizer.saved:
        case {"kind": "byte"}:
            pass
        case {"kind": "gpt2"}:
            merges, vocabulary = ours.gpt2_files()
            backend.model = models.BPE.from_file(vocabulary, merges)
        case {"kind": "char", "characters": characters}:
            ids = {c: i for i, c in enumerate(characters)}
            backend.model = models.WordLevel(ids, unk_token="")
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            backend.decoder = decoders.Fuse()
        case tree:
            return {name: tree[name] for name in tree if name != "end_of_text"}
    if tokenizer.eot is not None:  # end of text has the last id
        backend.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return json.loads(backend.to_str())
