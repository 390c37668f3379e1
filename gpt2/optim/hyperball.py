"""Hyperball: each matrix keeps its norm, and the learning rate is relative to this norm.

In a step, a matrix W of Frobenius norm R becomes R * unit(W - rate * R * unit(direction)), where
unit(X) is X divided by its norm (Wen et al. 2025, "Fantastic Pretraining Optimizers and Where to
Find Them 2.1: Hyperball Optimization", https://tinyurl.com/muonh). With Muon, the authors call this
MuonH, and with AdamW, AdamH.
"""

import jax
import jax.numpy as jnp
import optax
from jax import Array

from gpt2.optim.stacks import Kernel
from gpt2.utils.parameters import ParamInfo
from gpt2.utils.trees import Tree


def scale_to_matrices(parameters: Tree) -> optax.GradientTransformation:
    """Return a transformation that scales the direction of each matrix to the matrix's norm.

    The direction is the update before the learning rate. `parameters` is a tree of `ParamInfo`. The
    directions of parameters that are not matrices do not change.
    """

    def scale(info: ParamInfo, direction: Array, param: Array) -> Array:
        if not info.inputs:
            return direction
        return _with_norm_of(param, direction, info)

    def update(directions: Tree, params: Tree) -> Tree:
        return jax.tree.map(scale, parameters, directions, params)

    return optax.stateless(update)


def keep_norms(parameters: Tree) -> optax.GradientTransformation:
    """Return a transformation that changes the final updates so that each matrix keeps its norm.

    `parameters` is a tree of `ParamInfo`. The updates of parameters that are not matrices do not
    change.
    """

    def project(info: ParamInfo, update: Array, param: Array) -> Array:
        if not info.inputs:
            return update
        return _with_norm_of(param, param + update, info) - param

    def update(updates: Tree, params: Tree) -> Tree:
        return jax.tree.map(project, parameters, updates, params)

    return optax.stateless(update)


def _with_norm_of(param: Array, x: Array, info: ParamInfo) -> Array:
    """Return `x`, with its matrices scaled to the Frobenius norms of the matrices of `param`.

    `x` and `param` have the same shape. `info` says which axes make up the matrices.
    """
    kernel = Kernel.of(info, param)

    def squared_norms(matrices: Array) -> Array:
        square = jnp.square(matrices)
        return jnp.sum(square, axis=kernel.rows + kernel.columns, keepdims=True)

    # The maximum avoids 0 / 0. A direction of zeros remains 0.
    ratio = squared_norms(param) / jnp.maximum(squared_norms(x), 1e-30)
    return x * jnp.sqrt(ratio)
