"""SOAP and SOAP-Muon: Adam in the eigenbasis of Shampoo's preconditioner."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from gpt2.config import OptimConfig
from gpt2.optim.muon import momentum_schedule, muon_update
from gpt2.optim.stacks import Kernel, map_stacks
from gpt2.parallel.matrices import Matrices
from gpt2.utils.trees import Tree


class SoapState(NamedTuple):
    """The state of `scale_by_soap`. Each tree has the same paths as the parameters.

    The leading axes of Gram matrices, and of the bases of their eigenvectors, enumerate a kernel's
    matrices. The columns of a basis are the eigenvectors.
    """

    count: Array  # type: ignore[assignment]  # int32, number of updates so far
    mu: Tree  # running means of gradients, with the parameters' shapes
    # Running means of squared gradients in the eigenbasis, with the parameters' shapes. For
    # SOAP-Muon, these are means of the squared momentum.
    nu: Tree
    # Running means of G G^T, [..., rows, rows], where G is the gradient of a matrix.
    row_gram: Tree
    column_gram: Tree  # running means of G^T G, [..., columns, columns]
    row_basis: Tree  # eigenvectors of `row_gram` at the last refresh
    column_basis: Tree  # eigenvectors of `column_gram` at the last refresh


def scale_by_soap(
    optim: OptimConfig, parameters: Tree, matrices: Matrices = Matrices()
) -> optax.GradientTransformation:
    """Return SOAP (Vyas et al. 2024, arXiv 2409.11321) or SOAP-Muon, without a learning rate.

    `parameters` is a tree of `ParamInfo`. This tree, and the trees of gradients, must contain only
    matrices. `matrices` assigns whole matrices to devices.

    SOAP follows algorithms 3 and 4 of the paper. As in the authors' code, the first step only
    computes the Gram matrices and their eigenvectors, and its updates are 0. If the first gradient
    of a matrix is nearly singular, the eigenvectors depend on rounding.

    SOAP-Muon divides the momentum, in the eigenbasis, by the root of the momentum's running mean
    square, and orthogonalises the result as Muon does (github.com/KellerJordan/modded-nanogpt, pull
    request 278). Here, as in pull request 321, this applies to all matrices. The first step of
    SOAP-Muon is a step of Muon.
    """

    def init(params: Tree) -> SoapState:
        shapes = jax.tree.map(Kernel.of, parameters, params)

        def squares(side: int) -> Tree:
            return jax.tree.map(partial(_square, side=side), shapes, params)

        return SoapState(
            jnp.int32(0),
            jax.tree.map(jnp.zeros_like, params),
            jax.tree.map(jnp.zeros_like, params),
            squares(0),
            squares(1),
            squares(0),
            squares(1),
        )

    def update(
        updates: Tree, state: SoapState, params: Tree = None
    ) -> tuple[Tree, SoapState]:
        del params
        shapes = jax.tree.map(Kernel.of, parameters, updates)
        to_matrices = partial(jax.tree.map, Kernel.to_matrices, shapes)
        in_shape = map(to_matrices, (updates, state.mu, state.nu))

        def stack(x: Array) -> Array:
            return x.reshape(-1, *x.shape[-2:])

        bases = jax.tree.map(stack, state[3:])
        step = partial(_step, optim, matrices.platform)
        stacks = (*in_shape, *bases)
        direction, mu, nu, *bases = map_stacks(
            matrices,
            step,
            stacks,
            state.count,
        )
        to_kernels = partial(jax.tree.map, Kernel.from_matrices, shapes)
        direction = to_kernels(direction)
        mu = to_kernels(mu)
        nu = to_kernels(nu)
        bases = jax.tree.map(
            lambda x, old: x.reshape(old.shape), tuple(bases), state[3:]
        )
        return direction, SoapState(
            optax.safe_increment(state.count),
            mu,
            nu,
            *bases,
        )

    return optax.GradientTransformation(init, update)


def _square(kernel: Kernel, x: Array, side: int) -> Array:
    """Return zeros with the shape of a kernel's Gram matrices.

    For `side` 0, these are the Gram matrices of the rows; for `side` 1, of the columns.
    """
    size = kernel.sides[side]
    return jnp.zeros((*kernel.counts, size, size), x.dtype)


def _step(
    optim: OptimConfig, platform: str, stacks: tuple[Array, ...], count: Array
) -> tuple[Array, ...]:
    """Compute a step of SOAP or SOAP-Muon for stacks of matrices `[k, rows, columns]`.

    `stacks` holds the gradients, and then all fields of the current `SoapState` except `count`, in
    their order. Return the directions, and then the same fields of the next state.
    """
    is_muon = optim.name == "soap_muon"
    beta1 = momentum_schedule(optim)(count) if is_muon else optim.beta1
    beta2 = optim.beta2
    grads, mu, nu, row_gram, column_gram, row_basis, column_basis = stacks

    def average() -> tuple[Array, Array]:
        """Return the new running mean of gradients, and the momentum: this mean, or Nesterov's."""
        mean = beta1 * mu + (1 - beta1) * grads
        if is_muon and optim.nesterov:
            return mean, beta1 * mean + (1 - beta1) * grads
        return mean, mean

    def start() -> tuple[Array, ...]:
        rank = min(grads.shape[1:])
        rows = _eigenvectors(row_gram, rank)
        columns = _eigenvectors(column_gram, rank)
        if is_muon:
            mean, ahead = average()
            return ahead, mean, nu, rows, columns
        return jnp.zeros_like(grads), mu, nu, rows, columns

    def project(x: Array) -> Array:
        return row_basis.mT @ x @ column_basis

    def advance() -> tuple[Array, ...]:
        mean, ahead = average()
        moved = project(ahead)
        squared = jnp.square(moved if is_muon else project(grads))
        square = beta2 * nu + (1 - beta2) * squared
        adam = moved / (jnp.sqrt(square) + optim.eps)
        correction = jnp.sqrt(1 - beta2**count) / (1 - beta1**count)
        direction = correction * (row_basis @ adam @ column_basis.mT)

        def refresh() -> tuple[Array, ...]:
            rows, row_order = _power_iteration(row_gram, row_basis)
            columns, column_order = _power_iteration(column_gram, column_basis)
            turned = jnp.take_along_axis(square, row_order[:, :, None], axis=1)
            turned = jnp.take_along_axis(turned, column_order[:, None, :], axis=2)
            return turned, rows, columns

        def keep() -> tuple[Array, ...]:
            return square, row_basis, column_basis

        is_due = count % optim.precondition_every == 0
        refreshed = jax.lax.cond(is_due, refresh, keep)
        return direction, mean, *refreshed

    with jax.default_matmul_precision("highest"):
        row_gram = beta2 * row_gram + (1 - beta2) * (grads @ grads.mT)
        column_gram = beta2 * column_gram + (1 - beta2) * (grads.mT @ grads)
        direction, mu, nu, *bases = jax.lax.cond(count == 0, start, advance)
    if is_muon:
        direction = muon_update(direction, optim.orthogonalize, platform)
    return direction, mu, nu, row_gram, column_gram, *bases


def _eigenvectors(gram: Array, rank: int) -> Array:
    """Return the eigenvectors of Gram matrices `[k, n, n]`, largest eigenvalues first.

    Each Gram matrix is computed from a single gradient, so its rank is at most `rank`. The basis of
    the null space is not unique, so it is computed with QR, which returns the same basis on every
    device.
    """
    vectors = _decompose_each(lambda x: jnp.linalg.eigh(x)[1], gram)
    vectors = vectors[..., ::-1]
    if rank == gram.shape[-1]:
        return vectors
    known = vectors[..., :rank]
    return _decompose_each(lambda x: jnp.linalg.qr(x, mode="complete")[0], known)


def _power_iteration(gram: Array, basis: Array) -> tuple[Array, Array]:
    """Move the vectors of `basis` closer to the eigenvectors of `gram`, by one power iteration.

    The vectors are the columns of matrices `[k, n, n]`. Return the new vectors `[k, n, n]`, sorted
    from the largest eigenvalue to the smallest, and the indices `[k, n]` that sort the vectors of
    `basis` in this way.
    """
    product = gram @ basis
    eigenvalues = jnp.sum(basis * product, axis=1)
    order = jnp.argsort(-eigenvalues, axis=1)
    ordered = jnp.take_along_axis(product, order[:, None, :], axis=2)
    nearer = _decompose_each(lambda x: jnp.linalg.qr(x)[0], ordered)
    return nearer, order


def _decompose_each(decompose: Callable[[Array], Array], matrices: Array) -> Array:
    """Return `decompose(matrix)` for each matrix of `[k, ?, ?]`; on CPUs, one after another.

    LAPACK would divide a batch among the threads of all simulated devices, which can deadlock.
    """
    return jax.lax.platform_dependent(
        matrices, cpu=partial(jax.lax.map, decompose), default=jax.vmap(decompose)
    )
