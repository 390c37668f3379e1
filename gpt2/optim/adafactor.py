"""Adafactor: second moments kept as a row and a column (Shazeer and Stern 2018)."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gpt2.optim.matrices import axes_for
from gpt2.optim.parameters import Path, is_matrix, map_parameters, tensor_axes

# Section 9 of the paper: epsilon_1, epsilon_2, d, and the exponent of the second moment's decay.
_MIN_SQUARE = 1e-30
_MIN_SCALE = 1e-3
_MAX_RMS = 1.0
_EXPONENT = -0.8


class AdafactorState(NamedTuple):
    """Trees like the parameters, float32; each lacks the leaves that another one has.

    Attributes:
        count: int32 scalar, updates so far.
        row: of matrices, mean squares over their output axes, which have length 1.
        column: of matrices, mean squares over their input axes, which have length 1.
        full: of vectors, squares.
    """

    count: jax.Array  # type: ignore[assignment] # as optax names it
    row: Any
    column: Any
    full: Any


def scale_by_adafactor() -> optax.GradientTransformation:
    """Returns algorithm 4 of the paper, without its relative steps: the schedule gives them.

    Fused heads count as one matrix [in, out], and stacked layers as a matrix each. Without momentum
    the update is `max(1e-3, RMS(parameter)) * clipped direction`. torch.optim.Adafactor takes the
    same steps while its own bound on the learning rate, 1 / sqrt(step), and the least mean square
    that it divides by do not act.
    """

    def init_fn(params: Any) -> AdafactorState:
        return AdafactorState(jnp.int32(0), *_split(map_parameters(_zeros, params)))

    def update_fn(grads: Any, state: AdafactorState, params: Any = None):
        count = optax.safe_increment(state.count)
        average = partial(_average, new_share=count.astype(jnp.float32) ** _EXPONENT)
        old = state.row, state.column, state.full
        moments = _split(map_parameters(partial(_moments, average), grads, *old))
        updates = map_parameters(_direction, grads, params, *moments)
        return updates, AdafactorState(count, *moments)

    return optax.GradientTransformation(init_fn, update_fn)


class _Moments(NamedTuple):
    """What is kept of one parameter: a row and a column, or a full moment."""

    row: Any = optax.MaskedNode()
    column: Any = optax.MaskedNode()
    full: Any = optax.MaskedNode()


def _split(moments: Any) -> _Moments:
    """Returns a tree for each member, from a tree of all."""
    is_leaf = lambda node: isinstance(node, _Moments)  # noqa: E731
    return _Moments(
        *(
            jax.tree.map(lambda leaf, name=name: getattr(leaf, name), moments, is_leaf=is_leaf)
            for name in _Moments._fields
        )
    )


def _zeros(path: Path, param: jax.Array) -> _Moments:
    if not is_matrix(path):
        return _Moments(full=jnp.zeros_like(param))
    rows, columns = _matrix_axes(path, param)

    def without(axes: tuple[int, ...]) -> jax.Array:
        shape = [1 if axis in axes else size for axis, size in enumerate(param.shape)]
        return jnp.zeros(shape, param.dtype)

    return _Moments(row=without(columns), column=without(rows))


def _moments(average: Callable, path: Path, grad: jax.Array, row, column, full) -> _Moments:
    square = jnp.square(grad)
    if not is_matrix(path):
        return _Moments(full=average(full, square))
    rows, columns = _matrix_axes(path, grad)
    return _Moments(
        row=average(row, square.mean(columns, keepdims=True)),
        column=average(column, square.mean(rows, keepdims=True)),
    )


def _average(old: jax.Array, new: jax.Array, new_share: jax.Array) -> jax.Array:
    return (1 - new_share) * old + new_share * (new + _MIN_SQUARE)


def _direction(path: Path, grad, param, row, column, full) -> jax.Array:
    if is_matrix(path):
        rows, _ = _matrix_axes(path, grad)
        # The product of row and column may be too small for a float32.
        relative = row / row.mean(rows, keepdims=True)
        update = grad * jax.lax.rsqrt(relative) * jax.lax.rsqrt(column)
    else:
        update = grad * jax.lax.rsqrt(full)
    axes = tensor_axes(path, grad)
    clipped = update / jnp.maximum(1.0, _rms(update, axes) / _MAX_RMS)
    return clipped * jnp.maximum(_MIN_SCALE, _rms(param, axes))


def _matrix_axes(path: Path, param: jax.Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes of a matrix's rows (inputs, or the numbers of a table) and columns."""
    axes = tensor_axes(path, param)
    rows = axes[:1]
    if path[-1] == "kernel":
        rows = tuple(axis % param.ndim for axis in axes_for(path).inputs)
    return rows, tuple(axis for axis in axes if axis not in rows)


def _rms(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.square(x).mean(axes, keepdims=True))
