"""Rematerialisation: what a block keeps for its backward pass, and what it computes again.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". A policy keeps results of matrix
products by name. All between them, such as norms and activations, is computed again.
"""

import inspect
from collections.abc import Collection

import flax.linen as nn
from jax.ad_checkpoint import Recompute, Saveable

# The results of linear maps in attention, and of all others in a block.
ATTENTION_LINEAR = "attention/linear"
MLP_LINEAR = "mlp/linear"
# Attention's output, and statistics of rows that a fused kernel's backward rule reads.
CORE_ATTENTION = "attention/core"
# JAX names no results of cuDNN's kernel. The operation stands for them.
_CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"

_ATTENTION = (ATTENTION_LINEAR, CORE_ATTENTION, _CUDNN_ATTENTION)

# `memory.remat` -> what it stores of a block in addition to its input, if the backward pass reads
# it. `none` is not here: it computes nothing again.
KEPT: dict[str, tuple[str, ...]] = {
    "full": (),
    "attention": _ATTENTION,
    "mlp": (MLP_LINEAR,),
    "dots": (*_ATTENTION, MLP_LINEAR),
}


def remat(
    block: type[nn.Module], policy: str, *, static: Collection[str], looped: bool
) -> type[nn.Module]:
    """Return `block`, made to recompute its activations in the backward pass.

    `static` names its arguments that are not arrays. `looped`: it is the body of a loop.
    """
    arguments = list(inspect.signature(block.__call__).parameters)  # self is number 0

    def keep(operation, *_, **parameters):
        name = parameters["name"] if operation.name == "name" else operation.name
        return Saveable if name in KEPT[policy] else Recompute

    return nn.remat(
        block,
        policy=keep,
        # XLA cannot merge a loop's body with its recomputation. A barrier against that costs time.
        prevent_cse=not looped,
        static_argnums=tuple(arguments.index(name) for name in static),
    )


def compiler_options(policy: str, *, looped: bool, platform: str) -> dict[str, str]:
    """Return the options that keep XLA from undoing a policy; `platform` is that of the program.

    XLA:CPU drops all barriers before it merges equal expressions for the last time.
    """
    undone = platform == "cpu" and not looped and policy != "none"
    return {"xla_disable_hlo_passes": "cse_barrier_expander"} if undone else {}
