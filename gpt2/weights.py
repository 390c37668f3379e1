"""Loads models from their weights: a run of train.py, or a Hugging Face directory."""

import dataclasses
from functools import partial
from pathlib import Path

import jax

from gpt2 import hf
from gpt2.config import GPTConfig, holds_run, load_config
from gpt2.data import tokenizer as tokenizers
from gpt2.errors import UserError, require_source
from gpt2.hf.config import read_config
from gpt2.hf.tokenizer import count_tokens, load_tokenizer
from gpt2.training.checkpoint_weights import load_params
from gpt2.utils.scan import in_layout, is_scanned


def load_model(
    workdir: str | Path | None, hf_directory: str | Path | None, checkpoint: str | int = "best"
) -> tuple[GPTConfig, dict, tokenizers.Tokenizer]:
    """Loads configuration, parameters (on the default device) and tokenizer.

    Args:
        workdir: of a run, or None.
        hf_directory: of a Hugging Face model, or None; exactly one of the two is given.
        checkpoint: of the run: `best`, `latest` or a step.

    Raises:
        UserError: neither or both are given, or there is no such model.
    """
    require_source(workdir, hf_directory)
    if workdir:
        config, params = load_params(workdir, checkpoint)
        return config.gpt(), params, tokenizers.load(Path(workdir) / "tokenizer.json")
    assert hf_directory is not None  # checked above
    cfg, params = hf.load(hf_directory)
    tokenizer = load_tokenizer(Path(hf_directory), cfg)
    return cfg, jax.device_put(params), tokenizer


# Options in which two models may differ and still use the same parameters.
_FREE = (
    *("context_length", "dropout", "attention", "init", "init_std", "zero_init_projections"),
    *("param_dtype", "compute_dtype", "remat", "scan_layers", "scan_unroll"),
)


def check_source(source: str) -> None:
    """Checks that what `train.init_from` names is there, without reading its weights.

    Raises:
        UserError: it is not.
    """
    _look(*_split_source(source)[:2])


def load_initial_params(source: str, cfg: GPTConfig, tokenizer: tokenizers.Tokenizer) -> dict:
    """Loads the weights that `train.init_from` names.

    Args:
        source: `hf:DIR`, `run:DIR` (its best checkpoint) or `run:DIR@STEP`.
        cfg: the configuration of the new model. If its context is shorter than that of the
            weights, it takes their first positions.
        tokenizer: of the text that the model will learn.

    Returns:
        The parameters, in the layer layout of `cfg`, on the default device.

    Raises:
        UserError: the weights do not exist, belong to another architecture, or were learnt with
            another tokenizer.
    """
    kind, directory, step = _split_source(source)
    found, theirs = _look(kind, directory)
    if tokenizers.fingerprint(theirs) != tokenizers.fingerprint(tokenizer):
        raise UserError(
            f"the weights of train.init_from={source} were learnt with another tokenizer "
            f"({_describe(theirs)}) than the data's ({_describe(tokenizer)})",
            f"Use --config.data.tokenizer={_tokenizer_option(directory, theirs)}",
        )
    _check_same_model(source, found, cfg)
    if kind == "hf":
        _, params, _ = load_model(None, directory)
    else:
        _, params, _ = load_model(directory, None, step or "best")
    if cfg.position == "learned":
        positions = params["wpe"]["embedding"][: cfg.context_length]
        params = params | {"wpe": {"embedding": positions}}
    params = jax.tree.map(lambda x: x.astype(cfg.param_dtype), params)
    if is_scanned(params) == cfg.scan_layers:
        return params
    return jax.jit(partial(in_layout, scanned=cfg.scan_layers))(params)


def _split_source(source: str) -> tuple[str, Path, str]:
    """Returns the kind of a source, its directory, and the checkpoint it names, if it does."""
    kind, _, place = source.partition(":")
    directory, step = (place, "") if kind == "hf" else _split_step(place)
    return kind, Path(directory), step


def _split_step(place: str) -> tuple[str, str]:
    """Returns the directory and the checkpoint of `DIR@STEP`. A directory may hold an @ itself."""
    if Path(place).is_dir():
        return place, ""
    directory, _, step = place.rpartition("@")
    named = step.isdigit() or step in ("best", "latest")
    return (directory, step) if directory and named else (place, "")


def _look(kind: str, directory: Path) -> tuple[GPTConfig, tokenizers.Tokenizer]:
    """Reads a model's configuration and its tokenizer, without its weights."""
    if kind == "hf":
        if holds_run(directory):
            raise UserError(
                f"train.init_from=hf:{directory} names a run, not a Hugging Face directory",
                f"Use --config.train.init_from=run:{directory}",
            )
        _require_config(kind, directory)
        cfg = read_config(directory)
        tokens = count_tokens(directory, cfg)
        return dataclasses.replace(cfg, vocab_size=tokens), load_tokenizer(directory, cfg)
    _require_config(kind, directory)
    return load_config(directory).gpt(), tokenizers.load(directory / "tokenizer.json")


def _require_config(kind: str, directory: Path) -> None:
    """Raises, naming the option, unless there is something to load."""
    found, whose = {
        "hf": ("model", "that transformers' save_pretrained wrote"),
        "run": ("run", "of a run of train.py"),
    }[kind]
    if not (directory / "config.json").is_file():
        raise UserError(
            f"{directory} holds no {found} (no config.json), but train.init_from={kind}:{directory}"
            " names it",
            f"Give {kind}:DIR with a directory {whose}",
        )


def _check_same_model(source: str, found: GPTConfig, cfg: GPTConfig) -> None:
    """Raises, naming every option that differs, unless `cfg` can take the weights of `found`."""
    found, cfg = found.canonical(), cfg.canonical()
    pairs = {
        field.name: (getattr(found, field.name), getattr(cfg, field.name))
        for field in dataclasses.fields(GPTConfig)
        if field.name not in _FREE
    }
    if found.context_length < cfg.context_length and cfg.position == "learned":
        pairs["context_length"] = found.context_length, cfg.context_length
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if differing:
        what = [f"model.{name}={has}, not {wanted}" for name, (has, wanted) in differing.items()]
        options = [f"--config.model.{name}={has}" for name, (has, _) in differing.items()]
        raise UserError(
            f"the weights of train.init_from={source} have {', '.join(what)}",
            f"Use {' '.join(options)}",
        )


def _describe(tokenizer: tokenizers.Tokenizer) -> str:
    return f"{tokenizer.name}, {tokenizer.vocab_size} tokens"


def _tokenizer_option(directory: Path, tokenizer: tokenizers.Tokenizer) -> str:
    """Returns the option that names a model's tokenizer: its file, or its name without a file."""
    file = directory / "tokenizer.json"
    return str(file) if file.is_file() else tokenizer.name
