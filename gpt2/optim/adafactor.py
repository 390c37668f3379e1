"""Adafactor: second moments kept as a row and a column (Shazeer and Stern 2018)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gpt2.optim.matrices import axes_for
from gpt2.optim.parameters import Path, is_matrix, map_parameters, tensor_axes

# Section 9 of the paper: epsilon_1, epsilon_2, d, and the exponent of the second moment's decay.
_MIN_SQUARE, _MIN_SCALE, _MAX_RMS, _EXPONENT = 1e-30, 1e-3, 1.0, -0.8


class AdafactorState(NamedTuple):
    """Trees like the parameters, float32; each lacks the leaves that another one has."""

    count: jax.Array  # type: ignore[assignment] # int32 scalar, updates so far; as optax names it
    row: Any  # of matrices, mean squares over their output axes, which have length 1
    column: Any  # of matrices, mean squares over their input axes, which have length 1
    full: Any  # of vectors, squares


def scale_by_adafactor() -> optax.GradientTransformation:
    """Returns algorithm 4 of the paper, without its relative steps: the schedule gives them.

    Fused heads count as one matrix [in, out], and stacked layers as one each, unlike in optax's.
    """

    def init_fn(params: Any) -> AdafactorState:
        moments = (map_parameters(partial(_zeros, kind), params) for kind in _KINDS)
        return AdafactorState(jnp.int32(0), *moments)

    def update_fn(grads: Any, state: AdafactorState, params: Any = None):
        count = optax.safe_increment(state.count)
        new_share = count.astype(jnp.float32) ** _EXPONENT
        moments = [
            map_parameters(partial(_moment, new_share, kind), grads, getattr(state, kind))
            for kind in _KINDS
        ]
        updates = map_parameters(_direction, grads, params, *moments)
        return updates, AdafactorState(count, *moments)

    return optax.GradientTransformation(init_fn, update_fn)


_KINDS = AdafactorState._fields[1:]


def _averaged(kind: str, path: Path, x: jax.Array) -> tuple[int, ...] | None:
    """Returns the axes over which a moment of this kind is a mean; None: there is none."""
    if not is_matrix(path):
        return () if kind == "full" else None
    rows, columns = _matrix_axes(path, x)
    return {"row": columns, "column": rows, "full": None}[kind]


def _zeros(kind: str, path: Path, param: jax.Array) -> Any:
    axes = _averaged(kind, path, param)
    zeros = jnp.zeros_like(param)
    return optax.MaskedNode() if axes is None else zeros.mean(axes, keepdims=True)


def _moment(new_share: jax.Array, kind: str, path: Path, grad: jax.Array, old: Any) -> Any:
    axes = _averaged(kind, path, grad)
    if axes is None:
        return old
    mean_square = jnp.square(grad).mean(axes, keepdims=True)
    return (1 - new_share) * old + new_share * (mean_square + _MIN_SQUARE)


def _direction(path: Path, grad, param, row, column, full) -> jax.Array:
    """Returns `max(1e-3, RMS(parameter)) * clipped direction`."""
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
        rows = tuple(axis % param.ndim for axis in axes_for(path, param).inputs)
    return rows, tuple(axis for axis in axes if axis not in rows)


def _rms(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.square(x).mean(axes, keepdims=True))
