"""GPT-2's way of writing bytes as characters, and the tokenizer.json files that follow it."""

from typing import Any

END_OF_TEXT = "<|endoftext|>"


def byte_alphabet() -> dict[str, int]:
    """Returns the printable characters of a BPE file, each with its byte (GPT-2's encoder.py)."""
    shown = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


def gpt2_like_ranks(tree: dict[str, Any]) -> tuple[dict[bytes, int], int] | None:
    """Returns (ranks, eot) of a tokenizer.json that tiktoken computes identically, else None.

    Such a file holds byte-level BPE with GPT-2's pattern and nothing around it. Its ids grow in the
    order of the merges. `<|endoftext|>` is its only added token.
    """
    model = tree["model"]
    pattern = tree.get("pre_tokenizer") or {}
    added = [token["content"] for token in tree.get("added_tokens", [])]
    if (
        model.get("type") != "BPE"
        or any(
            model.get(k)
            for k in ("dropout", "unk_token", "byte_fallback", "ignore_merges")
        )
        or any(
            model.get(k) for k in ("continuing_subword_prefix", "end_of_word_suffix")
        )
        or pattern.get("type") != "ByteLevel"
        or pattern.get("add_prefix_space")
        or not pattern.get("use_regex", True)
        or tree.get("normalizer")
        or added != [END_OF_TEXT]
    ):
        return None
    vocabulary = dict(model["vocab"])
    eot = vocabulary.pop(END_OF_TEXT, tree["added_tokens"][0]["id"])
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    merged = [vocabulary["".join(pair)] for pair in merges]
    alphabet = byte_alphabet()
    ids = {*merged, *(vocabulary.get(c) for c in alphabet)}
    if merged != sorted(merged) or set(vocabulary.values()) != ids:
        return None
    if ids | {eot} != set(
        range(len(ids) + 1)
    ):  # an id without a token cannot be decoded
        return None
    return {
        bytes(alphabet[c] for c in token): i for token, i in vocabulary.items()
    }, eot
