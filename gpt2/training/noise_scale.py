"""The gradient noise scale: the batch size at which noise and signal are equal.

The mean gradient of n tokens has an expected squared norm of `signal + noise / n`: the signal is
the squared norm of the true gradient, and the noise is the variance of one token's gradient, summed
over all parameters. The squared norms for two batch sizes, a micro-batch and the whole batch,
determine signal and noise without bias (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1).
The noise scale is `noise / signal`, in tokens.
"""

from collections.abc import Callable

import jax.numpy as jnp
import optax
from jax import Array

from gpt2.utils.trees import Batch, Sums, Tree

_SQUARE = "micro_batch_square"
_INVERSE = "micro_batch_inverse"


def with_squares(gradients: Callable) -> Callable:
    """Wrap `gradients(micro_batch, index) -> (grads, sums)` so that it returns two more sums.

    These sums are the squared norm of the micro-batch's mean gradient, and 1 divided by the
    micro-batch's number of tokens. Both have the count 1, or 0 if the micro-batch has no token.
    """

    def add_squares(micro_batch: Batch, index: Array) -> tuple[Tree, Sums]:
        grads, sums = gradients(micro_batch, index)
        _, count = sums["loss"]
        has_tokens = jnp.float32(count > 0)
        inverse = has_tokens / jnp.where(count > 0, count, 1.0)
        square = optax.tree.norm(grads, squared=True) * inverse**2
        squares = {_SQUARE: (square, has_tokens), _INVERSE: (inverse, has_tokens)}
        return grads, sums | squares

    return add_squares


def with_noise(
    metrics: dict[str, Array], grad_norm: Array, count: Array, scale: Array | float
) -> dict[str, Array]:
    """Return `metrics` with `train/gradient_noise` and `train/gradient_signal`.

    These replace the two metrics that `with_squares` adds: the squared norm of a micro-batch's mean
    gradient, and 1 divided by the micro-batch's number of tokens. `grad_norm` is the norm of the
    mean gradient of all `count` tokens. `scale` is the loss scale: it still multiplies the
    gradients of the micro-batches, but `grad_norm` has already been divided by it.
    """
    metrics = dict(metrics)
    square = metrics.pop(f"train/{_SQUARE}") / scale**2
    inverse = metrics.pop(f"train/{_INVERSE}")
    noise = (square - grad_norm**2) / (inverse - 1.0 / count)
    metrics["train/gradient_noise"] = noise
    metrics["train/gradient_signal"] = grad_norm**2 - noise / count
    return metrics
