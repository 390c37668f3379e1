"""GPT-2's mapping from bytes to characters, and the tokenizer.json files that use it."""

import json
from collections.abc import Mapping

END_OF_TEXT = "<|endoftext|>"
# tiktoken encodes in place of the tokenizers library if it returns the same tokens. For this, the
# pre-tokenizer in a tokenizer.json must have the options in _PRE_TOKENIZER, and the BPE model must
# set no options other than those in _MODEL_OPTIONS.
_PRE_TOKENIZER = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_MODEL_OPTIONS = {"type", "vocab", "merges", "fuse_unk"}


def byte_alphabet() -> dict[str, int]:
    """Return a dict that maps each character in GPT-2's BPE files to the byte for which it stands.

    It is the inverse of `bytes_to_unicode` in OpenAI's encoder.py.
    """
    alphabet = dict[str, int]()
    hidden = list[int]()
    for byte in range(256):
        if chr(byte).isprintable() and byte != ord(" "):
            alphabet[chr(byte)] = byte
        else:
            hidden.append(byte)
    for number, byte in enumerate(hidden):
        alphabet[chr(256 + number)] = byte
    return alphabet


def gpt2_like_ranks(tree: Mapping) -> tuple[dict[bytes, int], int] | None:
    """Return `(ranks, eot)`, with which tiktoken encodes like the tokenizer in a tokenizer.json.

    `tree` is the parsed file. `ranks` maps the bytes of each token to its id, and `eot` is the id
    of the end-of-text token. Return None if tiktoken would encode differently. It encodes in the
    same way only if the file contains byte-level BPE with GPT-2's pre-tokenizer, ids that increase
    in the order of the merges, and `<|endoftext|>` as the only added token.
    """
    model = tree["model"]
    pre_tokenizer = {"use_regex": True} | (tree.get("pre_tokenizer") or {})
    options = {name for name, value in model.items() if value}
    added = [token["content"] for token in tree.get("added_tokens", [])]
    # Some files do not state the model's type, such as OpenAI's on the hub. Only BPE has merges.
    if "merges" not in model or not options <= _MODEL_OPTIONS:
        return None
    if not _PRE_TOKENIZER.items() <= pre_tokenizer.items() or tree.get("normalizer"):
        return None
    if added != [END_OF_TEXT]:
        return None
    vocabulary = dict(model["vocab"])
    eot = vocabulary.pop(END_OF_TEXT, tree["added_tokens"][0]["id"])
    alphabet = byte_alphabet()
    # A merge is a pair of tokens or, in older files, a string of two tokens and a space.
    merged = ["".join(merge).replace(" ", "") for merge in model["merges"]]
    longer = [token for token in vocabulary if token not in alphabet]
    longer.sort(key=vocabulary.__getitem__)
    if longer != merged or not alphabet.keys() <= vocabulary.keys():
        return None
    # An id without a token cannot be decoded.
    if {eot, *vocabulary.values()} != {*range(len(vocabulary) + 1)}:
        return None
    # tiktoken merges any two tokens whose joined bytes are a token, but the tokenizers library
    # merges only listed pairs. Both agree on every text if the listed pairs alone can merge the
    # characters of each token into that token.
    from tokenizers import Tokenizer

    library = Tokenizer(Tokenizer.from_str(json.dumps(tree)).model)
    for encoding in library.encode_batch(merged):
        if len(encoding.ids) > 1:
            return None
    ranks = dict[bytes, int]()
    for token, i in vocabulary.items():
        ranks[bytes(alphabet[c] for c in token)] = i
    return ranks, eot
