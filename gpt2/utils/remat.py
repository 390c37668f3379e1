"""Rematerialisation: what a block keeps for its backward pass, and what it computes again."""

import inspect
from collections.abc import Collection

import flax.linen as nn
import jax

# What each policy keeps of a block beside its input.
POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def remat(
    block: type[nn.Module], policy: str, *, static: Collection[str], scanned: bool
) -> type[nn.Module]:
    """Returns `block`, made to recompute its activations in the backward pass.

    Args:
        block: a Linen module class whose `__call__` is differentiated.
        policy: `none` (keep everything), `full` (keep the input only), `dots` (keep results of
            matrix products), `dots_no_batch` (keep those without batch dimensions: the linear
            layers', not attention's).
        static: names of the arguments of `__call__` that are not arrays.
        scanned: whether the block is the body of a scan. XLA cannot merge a scan's body with its
            recomputation, so the barrier against that, which costs time, is left out.
    """
    if policy == "none":
        return block
    arguments = list(inspect.signature(block.__call__).parameters)  # self is number 0
    return nn.remat(
        block,
        policy=POLICIES[policy],
        prevent_cse=not scanned,
        static_argnums=tuple(arguments.index(name) for name in static),
    )
