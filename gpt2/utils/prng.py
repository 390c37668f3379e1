"""Random keys. Each is derived from the run's seed and a purpose, such as dropout.

No key is stored, and no key is used twice.
"""

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
    """Return the dropout key of a micro-batch on a device at a step.

    Steps, micro-batches and devices count from 0. `device` is the device's index along the mesh
    axes that split the batch.
    """
    key = jax.random.fold_in(jax.random.key(seed), _DROPOUT)
    for index in (step, micro_batch, device):
        key = jax.random.fold_in(key, index)
    return key


def sample_key(seed: int) -> Array:
    """Return the key for sampling text.

    The sampler folds the index of the sequence into this key, and then the index of the new token.
    """
    return jax.random.fold_in(jax.random.key(seed), _SAMPLE)
