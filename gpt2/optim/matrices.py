"""Kernels as stacks of matrices, for optimizers that work on whole matrices.

A kernel is one matrix or several, `[k, rows, columns]`. Rows are those of the model's width, so
`c_proj` is transposed: all layers make few stacks, 124M `[48, 768, 768]` and `[24, 768, 3072]`.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gpt2.optim.parameters import Path, map_parameters
from gpt2.parallel.matrices import Matrices
from gpt2.utils.trees import Tree

# What each of a kernel's last axes is: `r`, the rows of its matrices, which are the model's width;
# `c`, their columns; `k` counts matrices, as do axes before these: of scanned layers, of experts.
# A matrix's inputs come first, its outputs last. By the kernel's module, with the one around it
# where that matters.
AXES = {
    "attn/c_attn": "rkcc",  # queries, keys and values
    "attn/c_q": "rcc",
    "attn/c_kv": "rkcc",
    "attn/c_proj": "ccr",
    "c_proj": "cr",
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The matrices of one kernel, whose `axes` are letters of `AXES`, one for each."""

    shape: tuple[int, ...]
    axes: str

    @classmethod
    def of(cls, path: Path, leaf: Array) -> "Kernel":
        """Returns the kernel that a parameter is. One that `AXES` lacks is `[..., in, out]`."""
        name = "/".join(path[-3:-1])
        by_module = AXES.get(path[-2], "rc")
        axes = AXES.get(name, by_module)
        return cls(leaf.shape, axes.rjust(leaf.ndim, "k"))

    def sizes(self, letter: str) -> list[int]:
        """Returns the sizes of the axes of a letter; of counts, the layers' first."""
        pairs = zip(self.axes, self.shape, strict=True)
        return [size for axis, size in pairs if axis == letter]

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of each matrix."""
        return math.prod(self.sizes("r")), math.prod(self.sizes("c"))

    @property
    def outputs(self) -> int:
        """Which of `sides` has the outputs."""
        return "rc".index(self.axes[-1])

    def to_matrices(self, x: Array) -> Array:
        """Returns the kernel `x` as matrices `[k, rows, columns]`."""
        return x.transpose(self._order).reshape(-1, *self.sides)

    def from_matrices(self, matrices: Array) -> Array:
        """Returns matrices `[k, rows, columns]` as the kernel: the inverse of `to_matrices`."""
        shape = [self.shape[axis] for axis in self._order]
        ordered = matrices.reshape(shape)
        return ordered.transpose(np.argsort(self._order))

    @property
    def _order(self) -> list[int]:
        """The kernel's axes: those that count, those of rows, those of columns."""
        places = ["krc".index(letter) for letter in self.axes]
        return np.argsort(places, kind="stable").tolist()


def kernels(tree: Tree) -> Tree:
    """Returns the `Kernel` of every leaf of a tree of hidden kernels."""
    return map_parameters(Kernel.of, tree)


def to_matrices(tree: Tree) -> Tree:
    """Returns every kernel of a tree as matrices `[k, rows, columns]`."""
    shapes = kernels(tree)
    return jax.tree.map(Kernel.to_matrices, shapes, tree)


def map_stacks(
    matrices: Matrices,
    function: Callable,
    trees: tuple[Tree, ...],
    *scalars: Array,
) -> tuple[Tree, ...]:
    """Maps `function(stacks, *scalars) -> tuple of stacks` over all matrices of trees `[k, ?, ?]`.

    Those of equal shapes are one call, whose matrices devices share as `matrices` say.
    """
    structure = jax.tree.structure(trees[0])
    columns = [jax.tree.leaves(tree) for tree in trees]
    members = defaultdict(list)
    for index, leaves in enumerate(zip(*columns, strict=True)):
        kinds = tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        members[kinds].append(index)
    results: dict[int, list[Array]] = {}
    for indices in members.values():
        stacks = tuple(
            jnp.concatenate([column[i] for i in indices]) for column in columns
        )
        mapped = matrices.map(function, stacks, *scalars)
        start = 0
        for i in indices:
            end = start + len(columns[0][i])
            results[i] = [stack[start:end] for stack in mapped]
            start = end
    in_order = [results[i] for i in range(len(results))]
    by_result = zip(*in_order, strict=True)
    return tuple(jax.tree.unflatten(structure, leaves) for leaves in by_result)
