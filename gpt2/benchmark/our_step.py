"""What first steps computed, read from this project's states: see `gpt2.benchmark.first_step`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gpt2.benchmark.first_step import draw_weight, sample
from gpt2.config import Config, GPTConfig
from gpt2.model import GPT
from gpt2.optim.parameters import is_matrix, map_parameters, unrolled_names
from gpt2.training.state import TrainState
from gpt2.utils.scan import stack_layers


def draw_params(cfg: GPTConfig) -> Any:
    """Returns the parameters that `draw_weight` draws, float32 in host memory."""
    model = GPT(dataclasses.replace(cfg, scan_layers=False))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    drawn = map_parameters(lambda path, leaf: draw_weight("/".join(path), leaf.shape), shapes)
    return stack_layers(drawn, lambda *leaves: np.stack(leaves)) if cfg.scan_layers else drawn


def samples(params: Any) -> dict[str, np.ndarray]:
    """Returns the entries of each parameter that are compared, by its name in unrolled layers."""
    found = {}

    def add(path: tuple[str, ...], leaf: jax.Array) -> None:
        names, values = unrolled_names(path, leaf), np.asarray(leaf)
        for name, value in zip(names, values if "h" in path else [values], strict=True):
            found[name] = sample(name, value)

    map_parameters(add, params)
    return found


def clipped_gradients(
    config: Config, before: dict[str, np.ndarray], state: TrainState
) -> dict[str, np.ndarray]:
    """Returns samples of the first step's clipped gradients, by name.

    They are read from the optimizer's first moment, so that no second program runs. AdamW keeps
    1 - beta1 of the clipped gradient. SGD keeps all of it, with the decay added.

    Args:
        config: of the program.
        before: `samples` of the parameters before the step.
        state: after it.
    """
    optim = config.optim
    is_sgd = optim.name == "sgd"
    moments = samples(optax.tree.get(state.opt_state, "trace" if is_sgd else "mu"))
    gradients = {}
    for name, moment in moments.items():
        decay = optim.weight_decay * before[name] if is_matrix(tuple(name.split("/"))) else 0.0
        gradients[name] = moment - decay if is_sgd else moment / (1 - optim.beta1)
    return gradients
