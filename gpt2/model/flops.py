"""The FLOPs that a model needs for a token, computed from the shapes of its parameters."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from gpt2.config import GPTConfig
from gpt2.config.shapes import StepShape
from gpt2.model.gpt import GPT
from gpt2.model.ingredients import ingredients_of
from gpt2.utils.parameters import is_declared


@functools.cache
def count_compute_parameters(cfg: GPTConfig) -> int:
    """Count the parameters that the computation of one token uses: matrices, biases, norms.

    The count excludes tables whose rows are looked up (one axis of such a table is named `table`),
    and experts that the token does not use. It includes the output head, even if the head is the
    token embedding.
    """
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    model = GPT(cfg)
    boxed = jax.eval_shape(model.draw, jax.random.key(0), tokens)
    total = cfg.vocab_size * cfg.embed_dim

    for box in jax.tree.leaves(boxed, is_leaf=is_declared):
        if "table" in box.info.axes:
            continue
        size: float = math.prod(box.value.shape)
        for ingredient in ingredients_of(cfg):
            size *= ingredient.active_fraction(box.info.axes)
        total += round(size)
    return total


def model_flops_per_token(cfg: GPTConfig, shape: StepShape | None = None) -> float:
    """Return the training FLOPs per token, `6 N + 12 L D T`.

    N is `count_compute_parameters(cfg)`, L the number of layers, D the width of all heads together,
    and T the context length or, for a layer with a shorter window, the window. As in PaLM
    (Chowdhery et al. 2022, appendix B) and nanoGPT's `estimate_mfu`, the FLOPs include attention
    scores above the diagonal, and exclude rematerialisation. If `shape` is given, its context
    length and its window replace the model's.
    """
    T = cfg.context_length
    if shape:
        T = shape.context_length
        cfg = dataclasses.replace(cfg, window=shape.window)
    seen = sum(min(window or T, T) for window in cfg.windows)
    heads = cfg.num_heads * cfg.head_size
    return float(6 * count_compute_parameters(cfg) + 12 * heads * seen)
