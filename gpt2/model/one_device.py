"""A model that computes with the kernels for one device."""

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
    """Return a model that computes with the kernels for a device, by default JAX's first device.

    With JAX_DISABLE_JIT, the model computes with the reference implementations.
    """
    if jit_is_off():
        return model.clone(ops=Ops())
    ops = ops_for(model.config, device or jax.devices()[0])
    return model.clone(ops=ops)


@functools.cache  # a new table for an equal model would make JAX compile its programs again
def ops_for(config: GPTConfig, device: jax.Device) -> Ops:
    """Return the table of operations of a model on one device."""
    mesh = Mesh(np.array([device]), ("data",))
    return make_ops(config, mesh, score_term_options(config))
