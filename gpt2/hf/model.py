"""A Hugging Face directory of GPT-2, read and written.

A directory holds config.json, the weights (model.safetensors or pytorch_model.bin, whole or in
shards) and the tokenizer. OpenAI's Conv1D weights are stored [in, out], as Flax kernels are: only
the heads, which are an axis of their own here, need reshaping. Rows of the vocabulary beyond the
tokenizer's are padding, which is neither read nor written.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.config import GPTConfig
from gpt2.data import tokenizer as tokenizers
from gpt2.errors import UserError
from gpt2.hf.names import hf_shape, read_config, tensors, to_hf_config
from gpt2.hf.tensor_files import StoredTensor, read_safetensors, read_torch, write_safetensors
from gpt2.hf.tokenizer import count_tokens, save_tokenizer
from gpt2.utils import files
from gpt2.utils.text import counted

__all__ = ["load", "require_new", "save"]

# Readers of weights, in order of preference.
_FILES = {"model.safetensors": read_safetensors, "pytorch_model.bin": read_torch}

# Tensors of older files that are not parameters: the causal mask, and its fill value.
_BUFFERS = ("attn.bias", "attn.masked_bias")


def load(directory: str | os.PathLike) -> tuple[GPTConfig, dict]:
    """Reads a Hugging Face GPT-2, tensor by tensor.

    Dropout is 0: it is a choice of training, not a part of the weights. Rows that pad the
    vocabulary of the directory's tokenizer are left out.

    Args:
        directory: holds config.json and the weights.

    Returns:
        The configuration, and the parameters as float32 arrays in host memory, layers unrolled.

    Raises:
        UserError: a file is missing or damaged, or config and tensors contradict each other.
    """
    directory = Path(directory)
    cfg = read_config(directory)
    stored = _stored_tensors(directory)
    prefix = "transformer." if "transformer.wte.weight" in stored else ""
    stored = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    expected = {name: (path, shape) for name, path, shape in tensors(cfg)}
    _check(directory, cfg, stored, {name: shape for name, (_, shape) in expected.items()})
    params: dict = {}
    for name, (path, shape) in expected.items():
        *parents, leaf = path
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = stored[name].read().astype(np.float32, copy=False).reshape(shape)
    if cfg.tie_embeddings and "lm_head.weight" in stored:
        head = stored["lm_head.weight"].read()
        if not np.array_equal(head.astype(np.float32), params["wte"]["embedding"]):
            raise UserError(
                f"{directory}: lm_head.weight is not wte.weight, and config.json says that the "
                "two are tied",
                'Set "tie_word_embeddings": false there',
            )
    num_tokens = count_tokens(directory, cfg)
    for name in ("wte", "lm_head"):
        if name in params:
            params[name] = {"embedding": params[name]["embedding"][:num_tokens]}
    return dataclasses.replace(cfg, vocab_size=num_tokens), params


def save(
    directory: str | os.PathLike,
    cfg: GPTConfig,
    params: Any,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> None:
    """Writes a directory that `transformers.GPT2LMHeadModel.from_pretrained` loads.

    Args:
        directory: must not exist yet, or be empty.
        cfg: the architecture. Missing biases are written as zeros, which is the same function.
        params: layers unrolled or scanned, as `cfg.scan_layers` says.
        tokenizer: written beside the weights, if given. Rows of the vocabulary beyond its tokens
            are left out.

    Raises:
        UserError: Hugging Face's GPT-2 has no option for one of `cfg`, the tokenizer has more
            tokens than the model, or the directory is not empty.
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

    places, shapes = {}, {}
    for name, place, shape in tensors(cfg):
        full_name = name if name.startswith("lm_head") else f"transformer.{name}"
        places[full_name], shapes[full_name] = place, hf_shape(name, shape)

    def get(name: str) -> np.ndarray:
        place = places[name]
        if place[-1] == "bias" and not cfg.bias:
            return np.zeros(shapes[name], np.float32)
        leaf = find_leaf(params, place)
        is_vocabulary = place[0] in ("wte", "lm_head")
        return np.asarray(leaf[: cfg.vocab_size] if is_vocabulary else leaf, np.float32)

    write_safetensors(path, shapes, get)


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Finds the weights of a directory, in one file or in the shards that an index lists."""
    for name, read in _FILES.items():
        if (directory / name).is_file():
            return read(directory / name)
        index = directory / f"{name}.index.json"
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (json.JSONDecodeError, KeyError, AttributeError) as error:
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
    stored: dict[str, StoredTensor],
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """Raises unless the stored tensors are those that the config asks for."""
    how = "config.json and weights must be of one model: download both again"
    if missing := [name for name in shapes if name not in stored]:
        count = counted(len(missing), "tensor")
        raise UserError(f"{directory}: {missing[0]} is missing ({count} in all)", how)
    for name, tensor in stored.items():
        if name.endswith(_BUFFERS) or (name == "lm_head.weight" and cfg.tie_embeddings):
            continue
        if name not in shapes:
            raise UserError(f"{directory}: config.json describes no tensor {name}", how)
        if tensor.shape != hf_shape(name, shapes[name]):
            raise UserError(
                f"{directory}: {name} has shape {list(tensor.shape)}, and config.json asks for "
                f"{list(hf_shape(name, shapes[name]))}",
                how,
            )


def require_new(directory: Path) -> None:
    """Raises a UserError unless `directory` does not exist yet, or is empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists already", "Give another directory, or remove it")
