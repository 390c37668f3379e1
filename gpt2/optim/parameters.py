"""Which parameter is which: names, kinds, and layers that are stacked.

A parameter of stacked layers (`gpt2.utils.scan`) has `h` in its path and a leading layer axis:
whatever is counted per tensor is counted per layer there.
"""

import re
from collections.abc import Callable

import jax
from jax import Array

from gpt2.utils.trees import Tree

Path = tuple[str, ...]

# Weight decay applies to parameters whose names end so. It does not go by the number of dimensions,
# since heads and scanned layers give biases and norm scales more than one.
_DECAYED = ("kernel", "embedding")
_LAYER = re.compile(r"h(_\d+)?")


def map_parameters(function: Callable, tree: Tree, *others: Tree) -> Tree:
    """Maps `function(path, leaf, *other leaves)` over parameters and trees like them."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(tuple(entry.key for entry in path), *leaves),
        tree,
        *others,
    )


def decay_mask(params: Tree) -> Tree:
    """Returns, for every parameter, whether weight decay applies: kernels and embeddings."""
    return map_parameters(lambda path, _: path[-1].endswith(_DECAYED), params)


def is_hidden_kernel(path: Path) -> bool:
    """Returns whether a parameter is a kernel inside a block."""
    is_in_block = any(_LAYER.fullmatch(name) for name in path)
    return is_in_block and path[-1].endswith("kernel")


def is_stacked(path: Path) -> bool:
    """Returns whether a parameter has a leading layer axis."""
    return "h" in path


def unrolled_names(path: Path, leaf: Array) -> list[str]:
    """Returns a parameter's name, such as `h_3/attn/c_attn/kernel`, for each layer in it."""
    if not is_stacked(path):
        return ["/".join(path)]
    return [
        "/".join(f"h_{index}" if name == "h" else name for name in path)
        for index in range(leaf.shape[0])
    ]
