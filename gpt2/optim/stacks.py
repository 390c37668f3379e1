"""Kernels as stacks of matrices, for optimizers that work on whole matrices.

A kernel (a weight array of a linear map) contains k matrices, and is reshaped to
`[k, rows, columns]`. The rows are the axis of the model's width, so the kernels `c_proj` are
transposed. The matrices of all layers then make few stacks: in the 124M model, `[48, 768, 768]` and
`[24, 768, 3072]`.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from gpt2.parallel.matrices import Matrices
from gpt2.utils.parameters import ParamInfo
from gpt2.utils.trees import Tree


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The layout of the matrices in a kernel, a weight array.

    Attributes:
        shape: the shape of the kernel.
        rows: the axes that make up the rows of a matrix.
        columns: the axes that make up the columns of a matrix. The remaining axes are batch axes:
            they enumerate the matrices.
        outputs: 0 if the rows are the outputs, 1 if the columns are.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    outputs: int

    @classmethod
    def of(cls, info: ParamInfo, leaf: Array) -> "Kernel":
        """Return the layout of the matrices in `leaf`, a parameter with the info `info`.

        If the outputs include the axis `embed` and the inputs do not, the rows are the outputs.
        Otherwise, the rows are the inputs.
        """
        inputs = tuple(axis + leaf.ndim for axis in info.inputs)
        outputs = tuple(axis + leaf.ndim for axis in info.outputs)
        reads_stream = "embed" in [info.axes[axis] for axis in inputs]
        writes_stream = "embed" in [info.axes[axis] for axis in outputs]
        if writes_stream and not reads_stream:
            return cls(leaf.shape, outputs, inputs, outputs=0)
        return cls(leaf.shape, inputs, outputs, outputs=1)

    @property
    def sides(self) -> tuple[int, int]:
        """The numbers of rows and of columns of each matrix."""
        return math.prod(self._sizes(self.rows)), math.prod(self._sizes(self.columns))

    @property
    def counts(self) -> list[int]:
        """The sizes of the batch axes, which enumerate the matrices."""
        return self._sizes(self._counting)

    def to_matrices(self, x: Array) -> Array:
        """Return the kernel `x` as matrices `[k, rows, columns]`."""
        return x.transpose(self._order).reshape(-1, *self.sides)

    def from_matrices(self, matrices: Array) -> Array:
        """Return the weight array that contains matrices `[k, rows, columns]`.

        This is the inverse of `to_matrices`.
        """
        ordered = matrices.reshape(self._sizes(self._order))
        return ordered.transpose(np.argsort(self._order))

    @property
    def _counting(self) -> tuple[int, ...]:
        sides = self.rows + self.columns
        return tuple(axis for axis in range(len(self.shape)) if axis not in sides)

    @property
    def _order(self) -> tuple[int, ...]:
        return self._counting + self.rows + self.columns

    def _sizes(self, axes: tuple[int, ...]) -> list[int]:
        return [self.shape[axis] for axis in axes]


def matrices_of(parameters: Tree) -> Tree:
    """Return `parameters`, a tree of `ParamInfo`, without the parameters that are not matrices.

    Each of these is replaced by an `optax.MaskedNode`.
    """
    return jax.tree.map(
        lambda info: info if info.inputs else optax.MaskedNode(), parameters
    )


def map_stacks(
    matrices: Matrices,
    function: Callable,
    trees: tuple[Tree, ...],
    *scalars: Array,
) -> tuple[Tree, ...]:
    """Apply `function(stacks, *scalars) -> tuple of stacks` to all matrices in `trees`.

    The trees have the same structure. Their leaves are `[k, rows, columns]`, with any sizes.
    `function` is called once for all leaves whose matrices have the same shapes and dtypes: for
    each tree, these leaves are concatenated to one stack, and `stacks` holds the stacks of all
    trees. `matrices` assigns the matrices of a stack to devices. The results are trees with the
    structure of the first tree.
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
