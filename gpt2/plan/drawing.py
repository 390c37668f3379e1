"""Draws on the terminal which devices hold which part of a run's arrays."""

import math
import re
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gpt2.errors import refuse
from gpt2.training.program import Program
from gpt2.utils.text import format_bytes


def visualize(program: Program, pattern: str) -> None:
    """Prints how the arrays are split whose names match `pattern`, a regular expression.

    Names are `params/h_0/mlp/c_fc/kernel`, `opt_state/1/0/mu/wte/embedding`, `batch/tokens`.
    """
    alike: dict[Any, list[str]] = {}
    leaves = jax.tree_util.tree_leaves_with_path(program.state_shapes)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    named |= {f"batch/{name}": leaf for name, leaf in program.batch_shapes.items()}
    for name, leaf in named.items():
        if leaf.ndim and re.search(pattern, name):
            alike.setdefault((leaf.shape, leaf.sharding.spec), []).append(name)
    refuse(not alike, f"--visualize={pattern} matches no array", f"An array is {name}")
    for names in sorted(alike.values(), key=lambda names: -named[names[0]].size):
        leaf, more = named[names[0]], len(names) - 3
        print("\n".join(names[:3]) + (f"\nand {more} more" if more > 0 else ""))
        part = leaf.sharding.shard_shape(leaf.shape)
        print(f"  {leaf.dtype} {list(leaf.shape)}, by {leaf.sharding.spec}")
        size = format_bytes(math.prod(part) * leaf.dtype.itemsize)
        print(f"  a device holds {list(part)}, {size}")
        # The two axes that are split, else the first ones, a box for each part.
        boxes = [size // each for size, each in zip(leaf.shape, part, strict=True)]
        dims = sorted(sorted(range(leaf.ndim), key=lambda dim: boxes[dim] == 1)[:2])
        spec = (*leaf.sharding.spec, *[None] * leaf.ndim)
        sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*(spec[dim] for dim in dims)))
        shape = tuple(boxes[dim] for dim in dims)
        jax.debug.visualize_sharding(shape, sharding, use_color=False, scale=0.3)
