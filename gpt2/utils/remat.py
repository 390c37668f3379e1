"""Rematerialisation: what a block keeps for its backward pass, and what it computes again."""

import flax.linen as nn
import jax

# What each policy keeps of a block beside its input.
_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def remat(block: type[nn.Module], policy: str, *, scanned: bool) -> type[nn.Module]:
    """Returns `block`, made to recompute its activations in the backward pass.

    Args:
        block: a Linen module class whose `__call__` is differentiated.
        policy: `none` (keep everything), `full` (keep the input only), `dots` (keep results of
            matrix products), `dots_no_batch` (keep those without batch dimensions: the linear
            layers', not attention's).
        scanned: whether the block is the body of a scan. A scan's body cannot be merged with its
            recomputation, so the barrier against that, which costs time, is left out.
    """
    if policy == "none":
        return block
    deterministic = 5  # the one argument that is no array, self counted
    return nn.remat(
        block, policy=_POLICIES[policy], prevent_cse=not scanned, static_argnums=(deterministic,)
    )
