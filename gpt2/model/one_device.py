"""A model by the kernels for one device."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh

from gpt2.config import GPTConfig
from gpt2.model.gpt import GPT
from gpt2.model.ingredients import score_term_options
from gpt2.ops import Ops
from gpt2.parallel.kernels import make_ops
from gpt2.utils.platform import jit_is_off


def with_kernels(model: GPT, device: jax.Device | None = None) -> GPT:
    """Returns a model that computes by the kernels for one device, JAX's first one by default."""
    if jit_is_off():
        return model.clone(ops=Ops())
    ops = ops_for(model.config, device or jax.devices()[0])
    return model.clone(ops=ops)


@functools.cache  # so that programs of equal models are compiled once
def ops_for(config: GPTConfig, device: jax.Device) -> Ops:
    """Returns the table of a model for one device."""
    mesh = Mesh(np.array([device]), ("data",))
    return make_ops(config, mesh, score_term_options(config))
