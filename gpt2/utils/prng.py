"""Random keys, each made from the seed and its purpose: none is stored and none is used twice."""

import jax
from jax import Array

# The streams that one seed gives rise to.
_INIT, _DROPOUT, _SAMPLE = range(3)


def init_key(seed: int) -> Array:
    """Returns the key that parameters are drawn with."""
    return jax.random.fold_in(jax.random.key(seed), _INIT)


def dropout_key(
    seed: int,
    step: Array | int,
    micro_batch: Array | int,
    device: Array | int,
) -> Array:
    """Returns the dropout key of one micro-batch on one device at one step, all counted from 0.

    `device` counts along the axes that split the batch.
    """
    key = jax.random.fold_in(jax.random.key(seed), _DROPOUT)
    for index in (step, micro_batch, device):
        key = jax.random.fold_in(key, index)
    return key


def sample_key(seed: int) -> Array:
    """Returns the key of generated text; sampling folds in the sequence, then the new token."""
    return jax.random.fold_in(jax.random.key(seed), _SAMPLE)
