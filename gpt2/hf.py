"""Weights from and to the Hugging Face world.

    python -m gpt2.hf import --from=DIR --workdir=DIR
    python -m gpt2.hf export --workdir=DIR --to=DIR [--checkpoint=best|latest|STEP]

A directory holds config.json, the weights (model.safetensors or pytorch_model.bin, whole or in
shards) and the tokenizer. OpenAI's Conv1D weights are stored [in, out], as Flax kernels are: only
the heads, which are an axis of their own here, need reshaping. Rows of the vocabulary beyond the
tokenizer's are padding, which is neither read nor written.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpt2.checkpoint import Checkpointer, load_params
from gpt2.config import Config, DataConfig, GPTConfig, ModelConfig
from gpt2.data import tokenizer as tokenizers
from gpt2.errors import UserError
from gpt2.hf_names import hf_shape, load_config, tensors, to_hf_config
from gpt2.hf_tokenizer import count_tokens, load_tokenizer, save_tokenizer
from gpt2.state import TrainState
from gpt2.utils.tensor_files import StoredTensor, read_safetensors, read_torch, write_safetensors

__all__ = ["load", "save"]

# Readers of weights, in order of preference.
_FILES = {"model.safetensors": read_safetensors, "pytorch_model.bin": read_torch}

# Tensors that are no parameters: the causal mask, and its fill value, as older files have them.
_BUFFERS = ("attn.bias", "attn.masked_bias")


def load(directory: str | os.PathLike) -> tuple[GPTConfig, dict]:
    """Reads a Hugging Face GPT-2, tensor by tensor.

    Dropout comes as 0: it is a choice of training, not a part of the weights. Rows that pad the
    vocabulary of the directory's tokenizer are left out.

    Args:
        directory: holds config.json and the weights.

    Returns:
        The configuration, and the parameters as float32 arrays in host memory, layers unrolled.

    Raises:
        UserError: a file is missing or damaged, or config and tensors contradict each other.
    """
    directory = Path(directory)
    cfg = load_config(directory)
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
        tokenizer: written beside the weights, where given. Rows of the vocabulary beyond its tokens
            are left out.

    Raises:
        UserError: GPT-2 at Hugging Face has no words for an option of `cfg`, the tokenizer has
            more tokens than the model, or the directory holds something.
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
    with _new_directory(directory) as partial:
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer is not None:
            save_tokenizer(partial, tokenizer, cfg.context_length)
        _write_tensors(partial / "model.safetensors", cfg, params)


def _write_tensors(path: Path, cfg: GPTConfig, params: Any) -> None:
    """Writes model.safetensors, fetching one tensor at a time to the host."""
    places, shapes = {}, {}
    for name, place, shape in tensors(cfg):
        full_name = name if name.startswith("lm_head") else f"transformer.{name}"
        places[full_name], shapes[full_name] = place, hf_shape(name, shape)

    def get(name: str) -> np.ndarray:
        head, *rest = places[name]
        if rest[-1] == "bias" and not cfg.bias:
            return np.zeros(shapes[name], np.float32)
        scanned = cfg.scan_layers and head.startswith("h_")
        node = params["h" if scanned else head]
        for key in rest:
            node = node[key]
        if head in ("wte", "lm_head"):
            node = node[: cfg.vocab_size]
        return np.asarray(node[int(head[2:])] if scanned else node, np.float32)

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
                raise UserError(f"{index} is no index: {error!r}", "Download it again") from None
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
        raise UserError(f"{directory}: {missing[0]} is missing ({len(missing)} tensors are)", how)
    for name, tensor in stored.items():
        if name.endswith(_BUFFERS) or (name == "lm_head.weight" and cfg.tie_embeddings):
            continue
        if name not in shapes:
            raise UserError(f"{directory}: config.json has no place for the tensor {name}", how)
        if tensor.shape != hf_shape(name, shapes[name]):
            raise UserError(
                f"{directory}: {name} has shape {list(tensor.shape)}, and config.json asks for "
                f"{list(hf_shape(name, shapes[name]))}",
                how,
            )


@contextlib.contextmanager
def _new_directory(directory: Path) -> Iterator[Path]:
    """Yields a directory that takes the name of `directory` at the end, if all went well."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists already", "Give another directory, or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        yield partial
        partial.chmod(0o755)
        os.replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def import_run(source: Path, workdir: Path) -> GPTConfig:
    """Turns a Hugging Face directory into a run at step 0, as if it had been trained here."""
    tokenizer = load_tokenizer(source, load_config(source))
    with _new_directory(workdir) as partial:
        cfg, params = load(source)
        groups = {
            field.name: field.type()
            for field in dataclasses.fields(Config)
            if dataclasses.is_dataclass(field.type)
        }
        groups["model"] = ModelConfig(
            **{field.name: getattr(cfg, field.name) for field in dataclasses.fields(ModelConfig)}
        )
        groups["data"] = DataConfig(tokenizer=str(workdir / "tokenizer.json"))
        config = Config(seed=0, **groups)
        (partial / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
        tokenizer.save(partial / "tokenizer.json")
        largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
        with Checkpointer(partial, parameters_in_flight=largest + 2**20) as checkpointer:
            state = TrainState(
                step=jnp.int32(0), params=_to_device(params), opt_state=(), loss_scale=None
            )
            checkpointer.save(state, step=0)
    return cfg


def _to_device(tree: dict) -> dict:
    """Moves arrays to the device one by one; `tree` is emptied, so that none is held twice."""
    moved = {}
    for name in list(tree):
        node = tree.pop(name)
        moved[name] = _to_device(node) if isinstance(node, dict) else jnp.asarray(node)
    return moved


def _import(args: Any) -> None:
    workdir = Path(_required(args, "workdir"))
    cfg = import_run(Path(_required(args, "from")), workdir)
    print(f"{workdir}: {cfg.num_layers} layers of width {cfg.embed_dim}")


def _export(args: Any) -> None:
    workdir, destination = Path(_required(args, "workdir")), _required(args, "to")
    config, params = load_params(workdir, args.checkpoint)
    save(destination, config.gpt(), params, tokenizers.load(workdir / "tokenizer.json"))
    print(f"{destination}: ready for transformers' from_pretrained")


def _required(args: Any, name: str) -> str:
    if not args[name].value:
        raise UserError(f"--{name} is missing", f"Say --{name}=DIR")
    return args[name].value


def _unknown_command(name: str) -> None:
    raise UserError(f"{name or 'nothing'} is no command", "Say python -m gpt2.hf import, or export")


def _main() -> None:
    # Who imports this module for its functions needs no command line.
    from absl import flags

    from gpt2 import cli

    flags.DEFINE_string("from", None, "import: the Hugging Face directory to read.")
    flags.DEFINE_string("to", None, "export: the Hugging Face directory to write.")
    flags.DEFINE_string("workdir", None, "The run to write (import) or read (export).")
    flags.DEFINE_string("checkpoint", "best", "export: best, latest or a step.")
    named = len(sys.argv) > 1 and not sys.argv[1].startswith("-")  # a flag may be --help
    commands = {"import": _import, "export": _export}
    name = sys.argv.pop(1) if named else ""
    cli.run(lambda: commands[name](flags.FLAGS) if name in commands else _unknown_command(name))


if __name__ == "__main__":
    _main()
