"""A Hugging Face directory, read and written.

It holds config.json, the weights (model.safetensors, whole or in shards) and the tokenizer. Rows of
the vocabulary beyond the tokenizer's are padding, neither read nor written.
"""

import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from gpt2.config import GPTConfig
from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import UserError
from gpt2.hf.config import read_config, to_hf_config
from gpt2.hf.families import family_for
from gpt2.hf.family import BUFFERS, Tensor
from gpt2.hf.tokenizer import count_tokens, save_tokenizer
from gpt2.utils import files


def load(directory: str | os.PathLike) -> tuple[GPTConfig, dict]:
    """Returns the configuration, without dropout, and the parameters: float32, layers unrolled."""
    directory = Path(directory)
    cfg = read_config(directory)
    family = family_for(cfg)
    stored = {
        family.full_name(name): array
        for name, array in _read_weights(directory).items()
    }

    def take(tensor: Tensor) -> np.ndarray:
        found = stored.pop(tensor.name, np.zeros(0))
        what = f"{directory}: {tensor.name} is missing, has another shape than {tensor.shape}"
        wrong = found.shape != tensor.shape or not np.isfinite(found).all()
        if wrong:
            raise UserError(f"{what}, or holds NaN or Inf")
        return tensor.from_stored(found)

    params: dict = {}
    for path, group in itertools.groupby(
        family.tensors(cfg), key=lambda tensor: tensor.path
    ):
        parts = list(group)
        arrays = [take(tensor) for tensor in parts]
        place = parts[0].part
        node = params
        for parent in path[:-1]:
            node = node.setdefault(parent, {})
        node[path[-1]] = np.stack(arrays, axis=place[0]) if place else arrays[0]
    head = stored.pop(family.head, params["wte"]["embedding"])  # of tied embeddings
    is_copy = np.array_equal(head.astype(np.float32), params["wte"]["embedding"])
    if not is_copy:
        raise UserError(
            f"{directory}: config.json ties {family.head} to an embedding that differs"
        )
    unknown = ", ".join(name for name in stored if not name.endswith(BUFFERS))
    if unknown:
        raise UserError(
            f"{directory}: the model of config.json has no tensor {unknown}"
        )
    num_tokens = count_tokens(directory, cfg)
    for name in {"wte", "lm_head"} & params.keys():
        params[name] = {"embedding": params[name]["embedding"][:num_tokens]}
    return dataclasses.replace(cfg, vocab_size=num_tokens), params


def save(
    directory: str | os.PathLike,
    cfg: GPTConfig,
    params: Any,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes a new directory that transformers' `AutoModelForCausalLM.from_pretrained` loads.

    Where the family has biases and `cfg` none, zeros are written. Parameters may be scanned.
    """
    import jax  # for which `python -m gpt2.hf` prepares first

    from gpt2.utils.scan import find_leaf

    directory = Path(directory)
    if tokenizer is not None:
        rows = cfg.vocab_size
        known = tokenizer.vocab_size
        if known > rows:
            raise UserError(f"the tokenizer has {known} tokens, and the model {rows}")
        cfg = dataclasses.replace(cfg, vocab_size=tokenizer.vocab_size)
    config = to_hf_config(cfg)
    config |= dict.fromkeys(
        ("bos_token_id", "eos_token_id"), tokenizer and tokenizer.eot
    )
    require_new(directory)
    tensors = [*family_for(cfg).tensors(cfg)]
    whole = jax.tree.leaves(params)
    paths = {tensor.path for tensor in tensors if tensor.path[-1] != "bias" or cfg.bias}
    more = sum(x.size for x in whole) - sum(
        find_leaf(params, path).size for path in paths
    )
    if more:
        raise UserError(
            f"Hugging Face's model has no place for {more:,} of the parameters"
        )

    def stored(tensor: Tensor) -> np.ndarray:
        if tensor.path[-1] == "bias" and not cfg.bias:
            return np.zeros(tensor.shape, np.float32)
        leaf = find_leaf(params, tensor.path)
        return tensor.to_stored(
            leaf[: cfg.vocab_size] if "V" in tensor.row.axes else leaf
        )

    with files.new_directory(directory) as partial:
        files.write_json(partial / "config.json", config)
        if tokenizer is not None:
            save_tokenizer(partial, tokenizer, cfg.context_length)
        arrays = {tensor.name: stored(tensor) for tensor in tensors}
        save_file(arrays, partial / "model.safetensors", metadata={"format": "pt"})


def require_new(directory: Path) -> None:
    """Raises a UserError unless `directory` does not exist yet, or is empty."""
    in_use = directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
    if in_use:
        raise UserError(
            f"{directory} exists already", "Give another directory, or remove it"
        )


def _read_weights(directory: Path) -> dict[str, np.ndarray]:
    """Reads the weights of a directory, from one file or from the shards that an index lists."""
    path = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    weights: dict[str, np.ndarray] = {}
    try:
        paths = [path]
        if index.is_file():
            names = json.loads(index.read_text("utf-8"))["weight_map"].values()
            paths = [directory / name for name in sorted(set(names))]
        for path in paths:
            with safe_open(path, framework="np") as file:
                weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return weights
    except Exception as error:  # each library raises its own
        what = f"{path} cannot be read: {error}".partition("\n")[0]
        raise UserError(what, "Save or download it again as safetensors") from None
