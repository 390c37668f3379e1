"""Whether the state of a run has room on its devices, told before anything is spent."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from gpt2.config import DEFAULTS, Config, with_options
from gpt2.data.tokenizer_names import tokens_by_name
from gpt2.errors import UserError
from gpt2.model import GPT
from gpt2.optim import make_optimizer
from gpt2.parallel import distributed
from gpt2.parallel.mesh import mesh_sizes
from gpt2.telemetry.memory import device_memory
from gpt2.training.program import draw_params
from gpt2.utils.text import format_bytes

# What makes a model large, and so what advice sets back.
_SIZES = ("num_layers", "embed_dim", "mlp_dim", "mlp_ratio", "vocab_size", "context_length")


def check_room(config: Config, devices: Sequence[jax.Device]) -> None:
    """Refuses a model whose parameters, gradients and moments alone exceed the devices' memory.

    Activations come on top, so that a run which passes may still be too large: `train.py --plan`
    tells.

    Raises:
        UserError: there is no room. The message names options with which there would be.
    """
    # Devices of other processes do not tell.
    own = next(device for device in devices if device.process_index == jax.process_index())
    memory = device_memory(own)
    sizes = mesh_sizes(config.parallel, len(devices))
    parts = sizes["fsdp"] * sizes["tensor"]
    needed = state_bytes(config)
    if not distributed.from_first(memory is not None and needed > memory * parts) or not memory:
        return
    what = (
        f"the parameters, gradients and moments take {format_bytes(needed // parts)} on each "
        f"device, which has {format_bytes(memory)}"
    )
    advice = _spread(config, len(devices), needed, memory) or _smaller(config, memory * parts)
    flags = " ".join(f"--config.{name}={value}" for name, value in advice.items())
    raise UserError(what, f"For example, use {flags}")


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
    # Without a norm of all gradients, and with nothing to add up, each can be used as it comes.
    waits = config.optim.clip_norm or config.train.accumulate_steps > 1
    return (1 + bool(waits)) * _bytes(params) + _bytes(jax.eval_shape(optimizer.init, params))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _spread(config: Config, num_devices: int, needed: int, memory: int) -> dict[str, Any]:
    """Returns options that spread the state over all devices, if there are some that fit."""
    options: dict[str, Any] = {"parallel.strategy": "zero3", "parallel.data": 1}
    if config.parallel.fsdp != DEFAULTS.parallel.fsdp:
        options["parallel.fsdp"] = -1
    try:
        sizes = mesh_sizes(with_options(config, options).parallel, num_devices)
    except UserError:  # another option of the config does not go with them
        return {}
    fits = needed <= memory * sizes["fsdp"] * sizes["tensor"]
    return options if fits and num_devices > 1 else {}


def _smaller(config: Config, memory: int) -> dict[str, Any]:
    """Returns sizes that differ from the config's: one of them if that will do, and that fit."""
    tree, defaults = config.to_dict()["model"], DEFAULTS.model
    options = [{f"model.{name}": defaults[name]} for name in _SIZES if tree[name] > defaults[name]]
    large = [each for each in options if _bytes_with(config, each) < state_bytes(config)]
    together = {name: value for each in large for name, value in each.items()}
    layers = together.get("model.num_layers", config.model.num_layers)
    halves = [layers >> times for times in range(1, layers.bit_length())]
    fewer = [together | {"model.num_layers": number} for number in halves]
    candidates = [*large, *([together] if together else []), *fewer]
    fits = (each for each in candidates if _bytes_with(config, each) <= memory)
    return next(fits, together | {"model.num_layers": 1})


def _bytes_with(config: Config, options: dict[str, Any]) -> float:
    """Returns the bytes of a state with other options, infinite if they do not go together."""
    try:
        return state_bytes(with_options(config, options))
    except UserError:
        return math.inf
