"""Runs from and to Hugging Face directories."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from gpt2.config import DEFAULTS, Config, DataConfig, GPTConfig, ModelConfig, load_config
from gpt2.data import tokenizer as tokenizers
from gpt2.hf.config import read_config
from gpt2.hf.families import family_for
from gpt2.hf.model import load, require_new, save
from gpt2.hf.tokenizer import load_tokenizer
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.checkpoint_weights import load_params
from gpt2.training.state import TrainState
from gpt2.utils import files


def import_run(source: Path, workdir: Path) -> GPTConfig:
    """Turns a Hugging Face directory into a run at step 0, as if it had been trained here.

    Args:
        source: the Hugging Face directory.
        workdir: must not exist yet, or be empty.

    Returns:
        The configuration of the model.

    Raises:
        UserError: the directory has no model or tokenizer that can be read, or `workdir` is not
            empty.
    """
    tokenizer = load_tokenizer(source, read_config(source))
    require_new(workdir)
    with files.new_directory(workdir) as partial:
        cfg, params = load(source)
        model = ModelConfig(
            **{field.name: getattr(cfg, field.name) for field in dataclasses.fields(ModelConfig)}
        )
        data = DataConfig(tokenizer=str(workdir / "tokenizer.json"))
        config = dataclasses.replace(Config.from_dict(DEFAULTS), model=model, data=data)
        files.write_json(partial / "config.json", config.to_dict())
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


def export_run(workdir: Path, directory: Path, checkpoint: str | int = "best") -> None:
    """Writes a run's weights and tokenizer as a Hugging Face directory.

    Args:
        workdir: of the run.
        directory: must not exist yet, or be empty.
        checkpoint: `best`, `latest` or a step.

    Raises:
        UserError: there is no such run or checkpoint, or `save` refuses.
    """
    family_for(load_config(workdir).gpt())  # refuses before weights are read
    config, params = load_params(workdir, checkpoint)
    save(directory, config.gpt(), params, tokenizers.load(workdir / "tokenizer.json"))
