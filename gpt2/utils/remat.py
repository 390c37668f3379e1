"""Rematerialisation: what a block stores for its backward pass, and what it computes again.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". A policy, the value of
`memory.remat`, determines which results of matrix products are stored. All other values, such as
norms and activations, are computed again.
"""

import flax.linen as nn
from jax.ad_checkpoint import Recompute, Saveable

# The names of the results of linear maps: one name for maps in attention, which have an axis of
# heads, and another for all other maps.
ATTENTION_LINEAR = "attention/linear"
MLP_LINEAR = "mlp/linear"
# The name of attention's output, and of the row statistics that a fused kernel's backward pass
# reads.
CORE_ATTENTION = "attention/core"
# JAX does not name the results of cuDNN's kernel, so the policies contain the operation's name.
_CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"

_ATTENTION = (ATTENTION_LINEAR, CORE_ATTENTION, _CUDNN_ATTENTION)

# `memory.remat` -> the names of the results that are stored in addition to a block's input, if the
# backward pass reads them. `none` has no entry, because it computes nothing again.
KEPT: dict[str, tuple[str, ...]] = {
    "full": (),
    "attention": _ATTENTION,
    "mlp": (MLP_LINEAR,),
    "dots": (*_ATTENTION, MLP_LINEAR),
}


def remat(
    block: type[nn.Module], policy: str, *, static: tuple[int, ...], looped: bool
) -> type[nn.Module]:
    """Return the module class `block`, changed so that it recomputes values in the backward pass.

    `policy`, a value of `memory.remat` other than `none`, chooses the values that are stored
    instead. `static` names the block's arguments that are not arrays. `looped` states whether the
    compiled program loops over the blocks.
    """

    def keep(operation, *_, **parameters):
        name = parameters["name"] if operation.name == "name" else operation.name
        return Saveable if name in KEPT[policy] else Recompute

    return nn.remat(
        block,
        policy=keep,
        # A barrier prevents XLA from merging a block with its recomputation, but costs time. In a
        # loop, XLA cannot merge the two anyway.
        prevent_cse=not looped,
        static_argnums=static,
    )


def compiler_options(policy: str, *, looped: bool, platform: str) -> dict[str, str]:
    """Return the compiler options that keep XLA from undoing the rematerialisation of `policy`.

    Only XLA:CPU needs one, and only if the layers are not `looped`. XLA:CPU removes optimization
    barriers before its last pass of common-subexpression elimination (CSE), which would then merge
    a block with its recomputation.
    """
    undone = platform == "cpu" and not looped and policy != "none"
    return {"xla_disable_hlo_passes": "cse_barrier_expander"} if undone else {}
