"""Random keys, derived from the seed and a purpose. No key is stored, and none is used twice."""

import jax
from jax import Array

# The purposes of keys.
_INIT, _DROPOUT, _SAMPLE = range(3)


def init_key(seed: int) -> Array:
    """Return the key for initialising the parameters."""
    return jax.random.fold_in(jax.random.key(seed), _INIT)


def dropout_key(
    seed: int,
    step: Array | int,
    micro_batch: Array | int,
    device: Array | int,
) -> Array:
    """Return the dropout key of a micro-batch on a device at a step, all counted from 0.

    `device` is the device's index along the mesh axes that split the batch.
    """
    key = jax.random.fold_in(jax.random.key(seed), _DROPOUT)
    for index in (step, micro_batch, device):
        key = jax.random.fold_in(key, index)
    return key


def sample_key(seed: int) -> Array:
    """Return the key for generated text.

    Sampling folds in the index of the sequence, and then the index of the new token.
    """
    return jax.random.fold_in(jax.random.key(seed), _SAMPLE)
