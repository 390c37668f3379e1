"""Padding of a table, whose gradient is cut where it is read."""

from functools import partial

import jax
import jax.numpy as jnp


def pad_rows(table: jax.Array, multiple: int) -> jax.Array:
    """Returns `table` `[V, D]` with rows of zeros up to a multiple."""
    padding = -len(table) % multiple
    # By nothing too: XLA:CPU sums the squares of a gradient that comes straight from a product in
    # windows, which takes ten times as long.
    return _pad_rows(table, padding) if padding else jnp.pad(table, ((0, 0), (0, 0)))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _pad_rows(table, padding):
    return jnp.pad(table, ((0, padding), (0, 0)))


def _pad_rows_fwd(table, padding):
    return _pad_rows(table, padding), None


def _pad_rows_bwd(padding, _, dtable):
    # The barrier makes XLA cut off the padding where the gradient is read. It would else cut what
    # adds up to the gradient, in copies.
    return (jax.lax.optimization_barrier(dtable)[:-padding],)


_pad_rows.defvjp(_pad_rows_fwd, _pad_rows_bwd)
