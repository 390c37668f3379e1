"""Read and write a Hugging Face directory.

A directory contains config.json, the weights (model.safetensors, one file or several shards) and
the tokenizer. Rows of the embedding for which the tokenizer has no token are padding. They are
dropped when weights are read, and are not written.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from gpt2.config import GPTConfig
from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import UserError
from gpt2.hf.config import read_config, to_hf_config
from gpt2.hf.families import family_for
from gpt2.hf.family import BUFFERS, Tensor
from gpt2.hf.tokenizer_files import load_tokenizer, save_tokenizer
from gpt2.utils import files

FLOATS = ("float16", "bfloat16", "float32", "float64")


def load(directory: str | os.PathLike) -> tuple[GPTConfig, dict]:
    """Return the config and the parameters of the model in a Hugging Face directory.

    The config has a dropout of 0. The parameters are float32 NumPy arrays, with unrolled layers.
    """
    # Flax imports JAX, and `python -m gpt2.hf` has to prepare the process before JAX is imported.
    from flax.traverse_util import unflatten_dict

    directory = Path(directory)
    cfg = read_config(directory)
    family = family_for(cfg)
    stored: dict[str, np.ndarray] = {}
    for name, array in _read_weights(directory):
        name = family.full_name(name)
        earlier = stored.setdefault(name, array)
        if earlier is not array and not np.array_equal(earlier, array):
            raise UserError(
                f"{directory} contains {name} twice, with different values",
                "Save or download the weights again",
            )

    leaves: dict[str, np.ndarray] = {}
    tensors = family.tensors(cfg)
    for path, parts in itertools.groupby(tensors, key=lambda tensor: tensor.path):
        arrays = [_take(directory, stored, tensor) for tensor in parts]
        leaves[path] = arrays[0]
        if len(arrays) > 1:
            leaves[path] = np.stack(arrays, axis=1)
    params = unflatten_dict(leaves, sep="/")
    embedding = params["wte"]["embedding"]
    head = stored.pop(family.head, embedding)  # some files repeat a tied embedding
    if not np.array_equal(head.astype(np.float32), embedding):
        raise UserError(
            f"{directory}: config.json ties {family.head} to the input embedding, but the weights "
            "have different values for the two",
            "Set tie_word_embeddings to false in config.json",
        )
    unknown = ", ".join(name for name in stored if not name.endswith(BUFFERS))
    if unknown:
        raise UserError(
            f"{directory}: the weights have the tensors {unknown}, which the model in config.json "
            "does not have",
            "Use the config.json that was saved with the weights",
        )
    num_tokens = cfg.vocab_size
    # Without a tokenizer, all rows are assumed to be tokens.
    with contextlib.suppress(UserError):
        num_tokens = load_tokenizer(directory, cfg).vocab_size
    for name in {"wte", "lm_head"} & params.keys():
        params[name] = {"embedding": params[name]["embedding"][:num_tokens]}
    return dataclasses.replace(cfg, vocab_size=num_tokens), params


def _take(directory: Path, stored: dict[str, np.ndarray], tensor: Tensor) -> np.ndarray:
    """Remove a tensor from `stored`, and return the parameter that it contains, in float32.

    If `tensor` stores only a part of a parameter, return this part. Raise a UserError if the tensor
    is missing, or if its shape or its values are wrong.
    """
    array = stored.pop(tensor.name, None)
    name = f"{directory}: {tensor.name}"
    remedy = (
        "Use the weights and the config.json of the same model, without quantization"
    )
    if array is None or array.shape != tensor.shape:
        message = f"{name} is missing, or does not have the shape {tensor.shape}"
        raise UserError(message, remedy)
    if array.dtype.name not in FLOATS:
        raise UserError(f"{name} has {array.dtype} values instead of floats", remedy)
    parameter = tensor.from_stored(array)
    if not np.isfinite(parameter).all():
        raise UserError(f"{name} has NaN or Inf", "Save or download the weights again")
    return parameter


def save(
    directory: str | os.PathLike,
    cfg: GPTConfig,
    params: dict,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a new directory that `AutoModelForCausalLM.from_pretrained` of transformers can load.

    If the Hugging Face family always has biases but `cfg` has none, write zeros for the biases. The
    layers of `params` may be scanned or unrolled. Without `tokenizer`, write no tokenizer.
    """
    from flax.traverse_util import flatten_dict

    from gpt2.utils.scan import in_layout

    directory = Path(directory)
    eot = None
    if tokenizer is not None:
        cfg = dataclasses.replace(cfg, vocab_size=tokenizer.vocab_size)
        eot = tokenizer.eot
    config = to_hf_config(cfg) | {"bos_token_id": eot, "eos_token_id": eot}
    leaves = flatten_dict(in_layout(params, scanned=False), sep="/")
    tensors = [*family_for(cfg).tensors(cfg)]
    unknown = leaves.keys() - {tensor.path for tensor in tensors}
    if unknown:
        raise UserError(
            f"params contains {', '.join(unknown)}, but the model that cfg describes does not",
            "Pass the cfg with which these parameters were trained",
        )
    arrays: dict[str, np.ndarray] = {}
    for tensor in tensors:
        if tensor.path.endswith("bias") and not cfg.bias:
            arrays[tensor.name] = np.zeros(tensor.shape, np.float32)
            continue
        leaf = leaves[tensor.path]
        if "V" in tensor.axes:
            leaf = leaf[: cfg.vocab_size]
        arrays[tensor.name] = tensor.to_stored(leaf)
    with files.new_directory(directory) as partial:
        files.write_json(partial / "config.json", config)
        if tokenizer is not None:
            save_tokenizer(partial, tokenizer, cfg.context_length)
        weights = partial / "model.safetensors"
        with files.reading(weights, "Free some disk space", failed="cannot be written"):
            save_file(arrays, weights, metadata={"format": "pt"})
        # safetensors makes its file readable only by its owner, whatever the umask is.
        shutil.copymode(partial / "config.json", weights)


def _read_weights(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the array of each tensor in the safetensors files of a directory.

    The tensors are in a single file, or in several files that an index file lists.
    """
    remedy = "Save or download the weights again as safetensors, without quantization"
    paths = [directory / "model.safetensors"]
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        with files.reading(index, remedy):
            names = json.loads(index.read_text("utf-8"))["weight_map"].values()
            paths = sorted({directory / name for name in names})
    for path in paths:
        with files.reading(path, remedy):
            yield from load_file(path).items()
