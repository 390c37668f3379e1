"""A Hugging Face directory, read and written.

A directory holds config.json, the weights (model.safetensors or pytorch_model.bin, whole or in
shards) and the tokenizer. gpt2/hf/families.py knows the tensors of each family of models, and how
they are stored. Rows of the vocabulary beyond the tokenizer's are padding, which is neither read
nor written.
"""

import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.config import GPTConfig
from gpt2.data import tokenizer as tokenizers
from gpt2.errors import MALFORMED, UserError
from gpt2.hf.config import read_config, to_hf_config
from gpt2.hf.families import Family, family_for
from gpt2.hf.layout import Tensor, tensors
from gpt2.hf.tensor_files import StoredTensor, read_safetensors, read_torch, write_safetensors
from gpt2.hf.tokenizer import count_tokens, save_tokenizer
from gpt2.utils import files

__all__ = ["load", "require_new", "save"]

# Readers of weights, in order of preference.
_FILES = {"model.safetensors": read_safetensors, "pytorch_model.bin": read_torch}


def load(directory: str | os.PathLike) -> tuple[GPTConfig, dict]:
    """Reads the weights of a Hugging Face directory, tensor by tensor.

    Dropout is 0: it is a choice of training, not a part of the weights. Rows that pad the
    vocabulary of the directory's tokenizer are left out.

    Args:
        directory: holds config.json and the weights.

    Returns:
        The configuration, and the parameters as float32 arrays in host memory, layers unrolled.

    Raises:
        UserError: a file is missing or damaged, config and tensors contradict each other, or the
            model is of no family that `gpt2.hf.families` has.
    """
    directory = Path(directory)
    cfg = read_config(directory)
    family = family_for(cfg)
    stored = {family.full_name(k): tensor for k, tensor in _stored_tensors(directory).items()}
    # One more than there are: config.json may speak of a billion layers.
    expected = list(itertools.islice(tensors(cfg), len(stored) + 1))
    _check(directory, cfg, family, stored, {tensor.name: tensor for tensor in expected})
    params: dict = {}
    for path, parts in itertools.groupby(expected, key=lambda tensor: tensor.path):
        *parents, leaf = path
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = _parameter(list(parts), stored)
        if not (np.isfinite(node[leaf].min()) and np.isfinite(node[leaf].max())):
            raise UserError(
                f"{directory}: {'/'.join(path)} holds numbers that are not finite",
                "Download the weights again, or take those of an earlier step",
            )
    if cfg.tie_embeddings and family.head in stored:
        head = stored[family.head].read()
        if not np.array_equal(head.astype(np.float32), params["wte"]["embedding"]):
            raise UserError(
                f"{directory}: {family.head} is not {family.first[0].name}, and config.json says "
                "that the two are tied",
                'Set "tie_word_embeddings": false there',
            )
    num_tokens = count_tokens(directory, cfg)
    for name in ("wte", "lm_head"):
        if name in params:
            params[name] = {"embedding": params[name]["embedding"][:num_tokens]}
    return dataclasses.replace(cfg, vocab_size=num_tokens), params


def _parameter(parts: list[Tensor], stored: dict[str, StoredTensor]) -> np.ndarray:
    """Returns a parameter, float32, from the tensors that are its parts, or that is all of it."""
    first = parts[0]
    if first.part is None:
        return np.ascontiguousarray(first.from_stored(stored[first.name].read()))
    arrays = [tensor.from_stored(stored[tensor.name].read()) for tensor in parts]
    return np.stack(arrays, axis=first.part_axis)


def save(
    directory: str | os.PathLike,
    cfg: GPTConfig,
    params: Any,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> None:
    """Writes a directory that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    Args:
        directory: must not exist yet, or be empty.
        cfg: the architecture, whose switches choose the family. Where that has biases and `cfg`
            none, zeros are written, which is the same function.
        params: layers unrolled or scanned, as `cfg.scan_layers` says.
        tokenizer: written beside the weights, if given. Rows of the vocabulary beyond its tokens
            are left out.

    Raises:
        UserError: no family has the switches of `cfg`, the tokenizer has more tokens than the
            model, or the directory is not empty.
    """
    directory = Path(directory)
    if tokenizer is not None:
        if tokenizer.vocab_size > cfg.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, and the model {cfg.vocab_size}",
                "Give the tokenizer that the model was trained with",
            )
        cfg = dataclasses.replace(cfg, vocab_size=tokenizer.vocab_size)
    config = to_hf_config(cfg)
    eot = None if tokenizer is None else tokenizer.eot
    config |= {"bos_token_id": eot, "eos_token_id": eot}
    require_new(directory)
    with files.new_directory(directory) as partial:
        files.write_json(partial / "config.json", config)
        if tokenizer is not None:
            save_tokenizer(partial, tokenizer, cfg.context_length)
        _write_tensors(partial / "model.safetensors", cfg, params)


def _write_tensors(path: Path, cfg: GPTConfig, params: Any) -> None:
    """Writes model.safetensors, fetching one tensor at a time to the host."""
    from gpt2.utils.scan import find_leaf  # brings JAX, which nothing else here needs

    places = {tensor.name: tensor for tensor in tensors(cfg)}

    def get(name: str) -> np.ndarray:
        tensor = places[name]
        if tensor.path[-1] == "bias" and not cfg.bias:
            return np.zeros(tensor.shape, np.float32)
        leaf = find_leaf(params, tensor.path)
        is_vocabulary = tensor.path[0] in ("wte", "lm_head")
        return tensor.to_stored(leaf[: cfg.vocab_size] if is_vocabulary else leaf)

    write_safetensors(path, {name: tensor.shape for name, tensor in places.items()}, get)


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Finds the weights of a directory, in one file or in the shards that an index lists."""
    for name, read in _FILES.items():
        if (directory / name).is_file():
            return read(directory / name)
        index = directory / f"{name}.index.json"
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
                if elsewhere := [shard for shard in shards if Path(shard).name != shard]:
                    raise ValueError(f"{elsewhere[0]!r} is no file beside it")
            except MALFORMED as error:
                raise UserError(
                    f"{index} is not an index of shards: {error!r}", "Download it again"
                ) from None
            for shard in shards:
                if not (directory / shard).is_file():
                    raise UserError(f"{directory / shard} is missing", "Download it as well")
            return {k: v for shard in shards for k, v in read(directory / shard).items()}
    raise UserError(
        f"{directory} holds no weights", f"It needs one of {', '.join(_FILES)}, or their shards"
    )


def _check(
    directory: Path,
    cfg: GPTConfig,
    family: Family,
    stored: dict[str, StoredTensor],
    expected: dict[str, Tensor],
) -> None:
    """Raises unless the stored tensors are those that the config asks for."""
    how = "config.json and weights must be of one model: download both again"
    if missing := next((name for name in expected if name not in stored), None):
        raise UserError(f"{directory}: {missing} is missing", how)
    for name, tensor in stored.items():
        if name.endswith(family.buffers) or (name == family.head and cfg.tie_embeddings):
            continue
        if name not in expected:
            raise UserError(f"{directory}: config.json describes no tensor {name}", how)
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{directory}: {name} has shape {list(tensor.shape)}, and config.json asks for "
                f"{list(expected[name].shape)}",
                how,
            )


def require_new(directory: Path) -> None:
    """Raises a UserError unless `directory` does not exist yet, or is empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists already", "Give another directory, or remove it")
