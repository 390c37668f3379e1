"""Whether the state of a run has room on its devices, told before anything is spent."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from gpt2.config import DEFAULTS, Config, with_options
from gpt2.data.tokenizer_names import tokens_by_name
from gpt2.errors import UserError
from gpt2.model import GPT
from gpt2.optim import make_optimizer
from gpt2.parallel.mesh import mesh_sizes
from gpt2.telemetry.memory import device_memory
from gpt2.training.program import draw_params
from gpt2.utils.text import format_bytes

# What makes a model large, and so what advice sets back.
_SIZES = tuple(
    f"model.{name}"
    for name in ("num_layers", "embed_dim", "mlp_dim", "mlp_ratio", "vocab_size", "context_length")
)


def check_room(config: Config, devices: Sequence[jax.Device]) -> None:
    """Refuses a model whose parameters, gradients and moments alone exceed the devices' memory.

    Activations come on top, so that a run which passes may still be too large: `train.py --plan`
    tells.

    Raises:
        UserError: there is no room. The message names options with which there would be.
    """
    memory = device_memory(devices[0])
    sizes = mesh_sizes(config.parallel, len(devices))
    parts = sizes["fsdp"] * sizes["tensor"]
    needed = state_bytes(config)
    if memory is None or needed <= memory * parts:
        return
    what = (
        f"the parameters, gradients and moments take {format_bytes(needed // parts)} on each "
        f"device, which has {format_bytes(memory)}"
    )
    if parts < len(devices) and config.parallel.backend == "pjit":
        spread = {"parallel.strategy": "zero3", "parallel.data": 1}
        if needed <= memory * len(devices):
            raise UserError(what, f"For example, use {_flags(spread)}")
    raise UserError(what, f"For example, use {_flags(_smaller(config, memory * parts))}")


def state_bytes(config: Config) -> int:
    """Returns the bytes of parameters, gradients and moments over all devices, without a program.

    Layers beyond the third are counted, not traced: each adds what the third does.
    """
    layers = config.model.num_layers
    if layers <= 3:
        return _traced_bytes(config, layers)
    two, three = _traced_bytes(config, 2), _traced_bytes(config, 3)
    return two + (layers - 2) * (three - two)


def _traced_bytes(config: Config, num_layers: int) -> int:
    model = dataclasses.replace(
        config.model,
        num_layers=num_layers,
        vocab_size=config.model.vocab_size or tokens_by_name(config.data.tokenizer) or 1,
        window=0,  # whose pattern may have more layers
        window_pattern=DEFAULTS.model.window_pattern,
    )
    small = dataclasses.replace(config, model=model)
    params = jax.eval_shape(partial(draw_params, GPT(small.gpt())), jax.random.key(0))
    names = dataclasses.replace(config.optim, layer_rates="")  # which may name further layers
    optimizer = make_optimizer(names, lambda step: 1.0, num_steps=config.train.num_steps)
    return 2 * _bytes(params) + _bytes(jax.eval_shape(optimizer.init, params))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _smaller(config: Config, memory: int) -> dict[str, Any]:
    """Returns sizes that differ from the config's and fit: one of them if that will do."""
    tree, defaults = config.to_dict()["model"], DEFAULTS.model
    large = {
        name: defaults[name.removeprefix("model.")]
        for name in _SIZES
        if tree[name.removeprefix("model.")] > defaults[name.removeprefix("model.")]
    }
    for name, value in large.items():
        try:
            if state_bytes(with_options(config, {name: value})) <= memory:
                return {name: value}
        except UserError:  # this one alone does not go with the others
            continue
    return large or {"model.num_layers": max(config.model.num_layers // 2, 1)}


def _flags(options: dict[str, Any]) -> str:
    return " ".join(f"--config.{name}={value}" for name, value in options.items())
