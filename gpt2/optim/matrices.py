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
from jax import Array

from gpt2.optim.parameters import Path, map_parameters
from gpt2.parallel.matrices import Matrices
from gpt2.utils.trees import Tree


@dataclasses.dataclass(frozen=True)
class Axes:
    """Which axes of a kernel, counted from the last, are those of its matrices; others count."""

    inputs: tuple[int, ...]  # those that are contracted
    outputs: tuple[int, ...]  # new ones, which follow them
    # Whether the outputs are the model's width, and not the inputs
    to_width: bool = False


_PLAIN = Axes((-2,), (-1,))
_HEADS = Axes((-3,), (-2, -1))
_SEVERAL = Axes((-4,), (-2, -1))  # axis -3 counts queries, keys and values

# A kernel's module, with the module around it where that matters. Scanned layers and experts add
# leading axes, which count.
AXES = {
    "attn/c_attn": _SEVERAL,
    "attn/c_q": _HEADS,
    "attn/c_kv": _SEVERAL,
    "attn/c_proj": Axes((-3, -2), (-1,), to_width=True),
    "c_proj": Axes((-2,), (-1,), to_width=True),
}


def axes_for(path: Path) -> Axes:
    """Returns which axes of a kernel are a matrix's. One that `AXES` lacks is `[..., in, out]`."""
    return AXES.get("/".join(path[-3:-1])) or AXES.get(path[-2], _PLAIN)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The matrices of one kernel."""

    shape: tuple[int, ...]
    axes: Axes

    @property
    def counts(self) -> tuple[int, ...]:
        """The shape of the axes that count matrices: the layer's first, where it is scanned."""
        num_sides = len(self.axes.inputs) + len(self.axes.outputs)
        return tuple(self.shape[axis] for axis in self._order[:-num_sides])

    @property
    def fan_out(self) -> int:
        """The number of outputs of each matrix."""
        return math.prod(self.shape[axis] for axis in self.axes.outputs)

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of each matrix."""
        sides = math.prod(self.shape[axis] for axis in self.axes.inputs), self.fan_out
        return sides[::-1] if self.axes.to_width else sides

    def to_matrices(self, x: Array) -> Array:
        """Returns the kernel `x` as matrices `[k, rows, columns]`."""
        return x.transpose(self._order).reshape(-1, *self.sides)

    def from_matrices(self, matrices: Array) -> Array:
        """Returns matrices `[k, rows, columns]` as the kernel: the inverse of `to_matrices`."""
        ordered = matrices.reshape([self.shape[axis] for axis in self._order])
        return ordered.transpose(
            [self._order.index(axis) for axis in range(len(self.shape))]
        )

    @property
    def _order(self) -> tuple[int, ...]:
        """The kernel's axes: those that count, those of rows, those of columns."""
        inputs = tuple(axis % len(self.shape) for axis in self.axes.inputs)
        outputs = tuple(axis % len(self.shape) for axis in self.axes.outputs)
        counts = tuple(
            axis for axis in range(len(self.shape)) if axis not in inputs + outputs
        )
        return counts + (outputs + inputs if self.axes.to_width else inputs + outputs)


def kernels(tree: Tree) -> Tree:
    """Returns the `Kernel` of every leaf of a tree of hidden kernels."""
    return map_parameters(lambda path, leaf: Kernel(leaf.shape, axes_for(path)), tree)


def to_matrices(tree: Tree) -> Tree:
    """Returns every kernel of a tree as matrices `[k, rows, columns]`."""
    return jax.tree.map(lambda kernel, x: kernel.to_matrices(x), kernels(tree), tree)


def map_stacks(
    matrices: Matrices, function: Callable, trees: tuple[Tree, ...], *scalars: Array
) -> tuple[Tree, ...]:
    """Maps `function(stacks, *scalars) -> tuple of stacks` over all matrices of trees `[k, ?, ?]`.

    Those of equal shapes are one call, whose matrices devices share as `matrices` say.
    """
    structure = jax.tree.structure(trees[0])
    columns = [jax.tree.leaves(tree) for tree in trees]
    members = defaultdict(list)
    for index, leaves in enumerate(zip(*columns, strict=True)):
        members[tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)].append(index)
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
    by_result = zip(*(results[i] for i in range(len(results))), strict=True)
    return tuple(jax.tree.unflatten(structure, leaves) for leaves in by_result)
