"""Options by their dotted names, such as `optim.name`: read from text, and set in a config."""

import functools
import operator
from collections.abc import Mapping
from typing import Any

from gpt2.config.choices import DEFAULTS, flatten
from gpt2.config.run import Config
from gpt2.errors import UserError, unknown_option

# What other codebases call our options.
ALIASES = {
    "lr": "optim.learning_rate",
    "max_lr": "optim.learning_rate",
    "min_lr": "optim.end_learning_rate",
    "wd": "optim.weight_decay",
    "grad_clip": "optim.clip_norm",
    "warmup_iters": "optim.warmup_steps",
    "optimizer": "optim.name",
    "max_iters": "train.num_steps",
    "max_steps": "train.num_steps",
    "steps": "train.num_steps",
    "gradient_accumulation_steps": "train.accumulate_steps",
    "eval_interval": "train.eval_every",
    "log_interval": "train.log_every",
    "block_size": "model.context_length",
    "seq_len": "model.context_length",
    "n_layer": "model.num_layers",
    "n_head": "model.num_heads",
    "n_embd": "model.embed_dim",
    "d_model": "model.embed_dim",
    "dtype": "precision.compute",
    "dataset": "data.corpus",
    "bs": "data.batch_size",
}


def read_option(name: str, text: str) -> Any:
    """Returns the value that `text` stands for, in the type of the option `name`.

    Raises:
        UserError: there is no such option, or `text` is not of its type.
    """
    names = flatten(DEFAULTS.to_dict())
    if name not in names:
        spellings = {each.rpartition(".")[2]: each for each in reversed(names)}
        spellings |= ALIASES | {each: each for each in names}
        if (last := name.rpartition(".")[2]) in ALIASES:
            spellings[name] = ALIASES[last]
        raise unknown_option(name, spellings, "See configs/default.py")
    default = names[name]
    kind = type(default)
    try:
        return {"True": True, "False": False}[text] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise UserError(
            f"{name}={text} is not of type {kind.__name__}",
            f"Give a value such as {name}={default}",
        ) from None


def option(config: Config, name: str) -> Any:
    """Returns the value of an option by its dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def with_options(config: Config, options: Mapping[str, Any]) -> Config:
    """Returns the config with some options set.

    Args:
        config: stays as it is.
        options: values by dotted name.

    Raises:
        UserError: the options cannot work.
    """
    tree = config.to_dict()
    for name, value in options.items():
        *groups, member = name.split(".")
        functools.reduce(operator.getitem, groups, tree)[member] = value
    return Config.from_dict(tree)
