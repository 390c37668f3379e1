"""Runs from and to Hugging Face directories."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from gpt2.config import DEFAULTS, Config, DataConfig, GPTConfig, ModelConfig, load_config
from gpt2.data import tokenizer as tokenizers
from gpt2.errors import UserError
from gpt2.hf.config import read_config
from gpt2.hf.families import family_for
from gpt2.hf.model import load, require_new, save
from gpt2.hf.tokenizer import load_tokenizer
from gpt2.training.checkpoint import Checkpointer, load_params
from gpt2.training.state import TrainState
from gpt2.utils import files


def import_run(source: Path, workdir: Path) -> GPTConfig:
    """Turns a Hugging Face directory into a run at step 0; returns the model's configuration."""
    tokenizer = load_tokenizer(source, read_config(source))
    require_new(workdir)
    with files.new_directory(workdir) as partial:
        cfg, params = load(source)
        names = (field.name for field in dataclasses.fields(ModelConfig))
        model = ModelConfig(**{name: getattr(cfg, name) for name in names})
        data = DataConfig(tokenizer=str(workdir / "tokenizer.json"))
        config = dataclasses.replace(Config.from_dict(DEFAULTS), model=model, data=data)
        files.write_json(partial / "config.json", config.to_dict())
        tokenizer.save(partial / "tokenizer.json")
        params = jax.tree.map(jnp.asarray, params)
        state = TrainState(step=jnp.int32(0), params=params, opt_state=(), loss_scale=None)
        with Checkpointer(partial) as checkpointer:
            checkpointer.save(state, step=0)
        if checkpointer.failure:
            raise UserError(checkpointer.failure, "Make room, and repeat the command")
    return cfg


def export_run(workdir: Path, directory: Path, checkpoint: str | int = "best") -> None:
    """Writes a run's weights (of its `best`, `latest` or numbered checkpoint) and its tokenizer."""
    family_for(load_config(workdir).gpt())  # refuses before weights are read
    config, params = load_params(workdir, checkpoint)
    save(directory, config.gpt(), params, tokenizers.load(workdir / "tokenizer.json"))
