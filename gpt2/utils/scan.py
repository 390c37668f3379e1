"""Scan or unroll the layers, and convert between the two layouts of their parameters.

The parameters of unrolled layers are in the subtrees `h_0`, `h_1`, ... The parameters of scanned
layers are in a single subtree `h`, whose leaves have a leading layer axis. A scan that is unrolled
completely combines two advantages: its parameters are few and large, as in any scan, and XLA can
fuse its blocks, as with unrolled layers.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import Array

from gpt2.utils.trees import Tree

METRICS = "metrics"  # the Flax collection to which `report` adds


def scan_layers(
    block: type[nn.Module],
    num_layers: int,
    *,
    unroll: int = 1,
) -> type[nn.Module]:
    """Return a module that applies `block(x, ...) -> (x, y)` `num_layers` times.

    The x that a layer returns is the x of the next layer. The `y` that the module returns and the
    second argument, the indices of the layers, have a leading layer axis. All other arguments are
    the same for every layer. Each iteration of the compiled loop applies `unroll` layers.
    """
    return nn.scan(
        block,
        variable_axes={"params": 0, METRICS: 0, "cache": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(0, nn.broadcast),  # the layer's index, the context
        length=num_layers,
        unroll=unroll,
    )


def report(
    module: nn.Module,
    name: str,
    total: Array,
    count: Array | float = 1.0,
    *,
    weight: float = 0.0,
) -> None:
    """Add a quantity of a module to the metrics, as `train/PATH/name` and `eval/PATH/name`.

    PATH is the module's path, such as `h_3/attn`. The logged value is the sum of `total` divided by
    the sum of `count`, over micro-batches, devices and validation batches. `total` must be a sum in
    float32, because 16 bits would be too coarse. If `weight` is not 0, `weight * total` is added to
    the objective as an auxiliary loss, but not to the logged loss. `total` must then be a sum over
    tokens. If the module is an expert, both sums also extend over all experts. An expert has a
    fixed number of slots for tokens, and its total includes slots to which no token was assigned.
    """
    auxiliary = jnp.float32(weight * total if weight else 0.0)
    values = (jnp.float32(total), jnp.float32(count), auxiliary)

    def nothing() -> Tree:
        return jax.tree.map(jnp.zeros_like, values)

    def add(before: Tree, sums: Tree) -> Tree:  # a module may be called twice
        return jax.tree.map(jnp.add, before, sums)

    module.sow(METRICS, name, values, add, nothing)


def reported(collection: Tree) -> dict[str, tuple[Array, Array, Array]]:
    """Return `{PATH/name: (total, count, weight * total)}` for all quantities passed to `report`.

    `collection` is the Flax collection `METRICS` after a forward pass.
    """
    tree = in_layout(collection, scanned=False)
    tree = jax.tree.map(jnp.sum, tree)  # each expert reports a number
    return flatten_dict(tree, sep="/")


def is_scanned(tree: Tree) -> bool:
    """Return whether the layers in `tree` are scanned, that is, stacked in a subtree `h`.

    `tree` contains parameters, or an optimizer's state with the same structure.
    """
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        if any(getattr(key, "key", None) == "h" for key in path):
            return True
    return False


def in_layout(
    tree: Tree,
    *,
    scanned: bool,
    stack: Callable = lambda *leaves: jnp.stack(leaves),
) -> Tree:
    """Return `tree`, a tree of parameters, with scanned or unrolled layers as `scanned` states.

    If the tree already has this layout, return it unchanged. `stack` joins the leaves of all layers
    into one leaf.
    """
    first = "h_0" if scanned else "h"

    def holds_layers(node: Tree) -> bool:
        return isinstance(node, dict) and first in node

    def convert(node: Tree) -> Tree:
        if not holds_layers(node):
            return node
        new = dict(node)
        if scanned:
            layers = list[Tree]()
            while (name := f"h_{len(layers)}") in new:
                layers.append(new.pop(name))
            new["h"] = jax.tree.map(stack, *layers)
        else:
            layers = new.pop("h")
            num_layers = jax.tree.leaves(layers)[0].shape[0]
            for i in range(num_layers):
                new[f"h_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], layers)
        return new

    return jax.tree.map(convert, tree, is_leaf=holds_layers)
