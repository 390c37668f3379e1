"""GPT-2 in Flax Linen."""

import jax
import numpy as np
from jax.sharding import Mesh

from gpt2.model.attention import Cache
from gpt2.model.gpt import GPT, GPTConfig, KVCache, num_params
from gpt2.model.ingredients import score_terms
from gpt2.parallel.kernels import make_ops

__all__ = ["GPT", "Cache", "GPTConfig", "KVCache", "num_params", "with_kernels"]


def with_kernels(model: GPT, device: jax.Device | None = None) -> GPT:
    """Returns a model that computes by the kernels for one device, JAX's first one by default."""
    mesh = Mesh(np.array([device or jax.devices()[0]]), ("data",))
    return model.clone(ops=make_ops(model.config, mesh, score_terms(model.config)))
