"""Layers scanned or unrolled: one loop body for all layers, and the two parameter layouts.

Unrolled layers keep parameters in siblings `h_0`, `h_1`, ... Scanned layers keep them in a single
`h`, whose leaves have a leading layer axis. Scanning compiles faster, and unrolling leaves XLA more
to fuse. A scan that is unrolled has both: blocks that XLA fuses, and few large parameters.
"""

import inspect
import re
from collections.abc import Callable, Collection
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

METRICS = "metrics"  # the collection of what modules `report`

_LAYER = re.compile(r"h_(\d+)")


def scan_layers(
    block: type[nn.Module], num_layers: int, *, per_layer: Collection[str], unroll: int = 1
) -> type[nn.Module]:
    """Returns a module that applies `block(x, ...) -> (x, y)` `num_layers` times, carrying x.

    `y` and the arguments `per_layer` have a leading layer axis outside; the others are the same for
    every layer. One turn of the loop holds `unroll` applications.
    """
    _, _, *others = inspect.signature(block.__call__).parameters  # self and x
    return nn.scan(
        block,
        variable_axes={"params": 0, METRICS: 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=tuple(0 if name in per_layer else nn.broadcast for name in others),
        length=num_layers,
        unroll=unroll,
    )


def report(module: nn.Module, name: str, total: jax.Array, count: jax.Array | float = 1.0) -> None:
    """Adds a quantity of a module to the metrics: `train/PATH/name` and `eval/PATH/name`.

    PATH is the module's, such as `h_3/attn`. The scalars `total` and `count` add up over
    micro-batches, devices and batches of a validation; their quotient is logged.
    """
    pair = jnp.float32(total), jnp.float32(count)
    module.sow(METRICS, name, pair, init_fn=lambda: None, reduce_fn=lambda _, new: new)


def reported(collection: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns `{PATH/name: (total, count)}` of what modules `report`, layer by layer."""
    found = {}
    is_pair = lambda node: isinstance(node, tuple)  # noqa: E731
    for path, pair in jax.tree_util.tree_leaves_with_path(collection, is_leaf=is_pair):
        names = [entry.key for entry in path]
        if "h" in names:  # stacked
            at = names.index("h")
            for i in range(len(pair[0])):
                layer = "/".join([*names[:at], f"h_{i}", *names[at + 1 :]])
                found[layer] = pair[0][i], pair[1][i]
        else:
            found["/".join(names)] = pair
    return found


def stack_layers(tree: Any, stack: Callable = lambda *leaves: jnp.stack(leaves)) -> Any:
    """Turns unrolled layers into scanned ones, wherever a dictionary in `tree` holds them.

    `tree` is parameters, or any state that contains dictionaries like them (an optimizer's);
    `stack` joins the corresponding leaves of all layers.
    """

    def convert(node: dict) -> dict:
        layers = sorted((k for k in node if _LAYER.fullmatch(k)), key=lambda k: int(k[2:]))
        rest = {k: v for k, v in node.items() if k not in layers}
        return rest | {"h": jax.tree.map(stack, *(node[k] for k in layers))}

    return _convert(tree, lambda node: any(_LAYER.fullmatch(k) for k in node), convert)


def unstack_layers(
    tree: Any, num_layers: int, take: Callable = lambda leaf, index: leaf[index]
) -> Any:
    """Turns scanned layers into unrolled ones: `take` gives a layer's leaf of a stacked one."""

    def convert(node: dict) -> dict:
        def layer(i: int) -> Any:
            return jax.tree.map(lambda leaf: take(leaf, i), node["h"])

        rest = {k: v for k, v in node.items() if k != "h"}
        return rest | {f"h_{i}": layer(i) for i in range(num_layers)}

    return _convert(tree, lambda node: "h" in node, convert)


def is_scanned(tree: Any) -> bool:
    """Returns whether the parameters in `tree`, or any state that follows them, are stacked."""
    return _stacked_leaf(tree) is not None


def in_layout(
    tree: Any,
    *,
    scanned: bool,
    stack: Callable = lambda *leaves: jnp.stack(leaves),
    take: Callable = lambda leaf, index: leaf[index],
) -> Any:
    """Returns a tree of parameters in the wanted layout: as it is, stacked or unstacked."""
    stacked = _stacked_leaf(tree)
    if (stacked is not None) == scanned:
        return tree
    return stack_layers(tree, stack) if scanned else unstack_layers(tree, stacked.shape[0], take)


def find_leaf(params: dict, path: tuple[str, ...]) -> Any:
    """Returns the leaf at a path of unrolled parameters, of either layout, as `("h_3", "ln_1")`."""
    layer = _LAYER.fullmatch(path[0])
    index = int(layer[1]) if layer and path[0] not in params else None
    node = params[path[0] if index is None else "h"]
    for name in path[1:]:
        node = node[name]
    return node if index is None else node[index]


def _stacked_leaf(tree: Any) -> Any:
    """Returns some leaf with a layer axis, or None."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    stacked = (leaf for path, leaf in leaves if any(getattr(k, "key", None) == "h" for k in path))
    return next(stacked, None)


def _convert(tree: Any, holds_layers: Callable, convert: Callable) -> Any:
    def is_target(node: Any) -> bool:
        return isinstance(node, dict) and holds_layers(node)

    swap = lambda node: convert(node) if is_target(node) else node  # noqa: E731
    return jax.tree.map(swap, tree, is_leaf=is_target)
