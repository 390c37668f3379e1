"""Layers scanned or unrolled: one loop body for all layers, and the two parameter layouts.

Unrolled layers keep parameters in siblings `h_0`, `h_1`, ... Scanned layers keep them in a single
`h`, whose leaves have a leading layer axis. An unrolled scan has few large parameters, and blocks
that XLA fuses.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import Array

from gpt2.utils.trees import Tree

METRICS = "metrics"  # the collection of what modules `report`


def scan_layers(
    block: type[nn.Module],
    num_layers: int,
    *,
    per_layer: Collection[str],
    unroll: int = 1,
) -> type[nn.Module]:
    """Returns a module that applies `block(x, ...) -> (x, y)` `num_layers` times, carrying x.

    `y` and the arguments `per_layer` have a leading layer axis outside; the others are the same for
    every layer. One turn of the loop holds `unroll` applications.
    """
    _, _, *others = inspect.signature(block.__call__).parameters  # self and x
    return nn.scan(
        block,
        variable_axes={"params": 0, METRICS: 0, "cache": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=tuple(0 if name in per_layer else nn.broadcast for name in others),
        length=num_layers,
        unroll=unroll,
    )


def for_layer(function: Callable, values: Sequence, layer: Array) -> Tree:
    """Returns `function(value)` for a layer's value; `values` are Python's, one for each layer.

    `layer` is traced in a scan, where every different value has a branch of its own.
    """
    different = sorted(set(values))
    branch = jnp.array([different.index(value) for value in values])[layer]
    return jax.lax.switch(branch, [partial(function, value) for value in different])


def report(
    module: nn.Module,
    name: str,
    total: Array,
    count: Array | float = 1.0,
    *,
    weight: float = 0.0,
) -> None:
    """Adds a quantity of a module to the metrics: `train/PATH/name` and `eval/PATH/name`.

    PATH is the module's, as `h_3/attn`. `total` (a sum in float32: 16 bits would show) and `count`
    add up over micro-batches, devices and batches of a validation; their quotient is logged. An
    auxiliary loss has a `weight`: so many times its total, summed over tokens, is differentiated
    with the loss, and not logged in it. Within an expert the totals of all experts add up; those of
    places that no token took are in.
    """
    # What is only logged gives no gradient: 0 times that of a root at 0 is NaN.
    auxiliary = jnp.float32(weight * total if weight else 0.0)
    logged = jax.lax.stop_gradient((jnp.float32(total), jnp.float32(count)))

    def nothing() -> Tree:
        return jax.tree.map(jnp.zeros_like, (*logged, auxiliary))

    def add(before: Tree, sums: Tree) -> Tree:  # of a module that is called twice
        return jax.tree.map(jnp.add, before, sums)

    module.sow(METRICS, name, (*logged, auxiliary), add, nothing)


def reported(collection: Tree) -> dict[str, tuple[Array, Array, Array]]:
    """Returns `{PATH/name: (total, count, weighted total)}` of what modules `report`."""
    tree = in_layout(collection, scanned=False)
    tree = jax.tree.map(jnp.sum, tree)  # over experts, each of which reports
    return flatten_dict(tree, sep="/")


def is_scanned(tree: Tree) -> bool:
    """Returns whether the parameters in `tree`, or any state that follows them, are stacked."""
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
    """Returns a tree of parameters in the wanted layout: as it is, stacked or unstacked.

    `stack` joins the leaves of all layers.
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
