"""Layers scanned or unrolled: one loop body for all layers, and the two parameter layouts.

Unrolled layers keep parameters in siblings `h_0`, `h_1`, ...; scanned ones in a single `h` whose
leaves have a leading layer axis. Both compute the same; scanning compiles faster, unrolling leaves
XLA more to fuse.
"""

import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

_LAYER = re.compile(r"h_(\d+)")


def scan_layers(block: type[nn.Module], num_layers: int) -> type[nn.Module]:
    """Returns a module that applies `block` `num_layers` times, carrying its first argument.

    The block is called as `block(x, cache, positions, segments, deterministic) -> (x, cache)`;
    `cache` has a leading layer axis outside, the arguments after it are the same for every layer.
    """
    return nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(0, *3 * (nn.broadcast,)),
        length=num_layers,
    )


def stack_layers(tree: Any, stack: Callable = lambda *leaves: jnp.stack(leaves)) -> Any:
    """Turns unrolled layers into scanned ones, wherever a dictionary in `tree` holds them.

    Args:
        tree: parameters, or any state that contains dictionaries like them (an optimizer's).
        stack: how to join the corresponding leaves of all layers, in order.
    """

    def convert(node: dict) -> dict:
        layers = sorted((k for k in node if _LAYER.fullmatch(k)), key=lambda k: int(k[2:]))
        rest = {k: v for k, v in node.items() if k not in layers}
        return rest | {"h": jax.tree.map(stack, *(node[k] for k in layers))}

    return _convert(tree, lambda node: any(_LAYER.fullmatch(k) for k in node), convert)


def unstack_layers(
    tree: Any, num_layers: int, take: Callable = lambda leaf, index: leaf[index]
) -> Any:
    """Turns scanned layers into unrolled ones: the inverse of `stack_layers`.

    Args:
        tree: parameters, or any state that contains dictionaries like them.
        num_layers: the length of the layer axis.
        take: how to take one layer's leaf out of the stacked one.
    """

    def convert(node: dict) -> dict:
        layers = {
            f"h_{i}": jax.tree.map(lambda leaf, i=i: take(leaf, i), node["h"])
            for i in range(num_layers)
        }
        return {k: v for k, v in node.items() if k != "h"} | layers

    return _convert(tree, lambda node: "h" in node, convert)


def _convert(tree: Any, holds_layers: Callable, convert: Callable) -> Any:
    def is_target(node):
        return isinstance(node, dict) and holds_layers(node)

    return jax.tree.map(
        lambda node: convert(node) if is_target(node) else node, tree, is_leaf=is_target
    )
