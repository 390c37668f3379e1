"""Muon and NorMuon: the orthogonalised momentum of each hidden matrix."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from gpt2.config import OptimConfig
from gpt2.optim.stacks import Kernel, map_stacks
from gpt2.parallel.matrices import Matrices
from gpt2.utils.parameters import ParamInfo
from gpt2.utils.trees import Tree

# `optim.orthogonalize` -> the coefficients of each iteration's quintic polynomial. Newton-Schulz
# uses the same polynomial five times (Jordan et al. 2024). In each iteration, Polar Express uses
# the polynomial that is optimal for the results of the earlier iterations, if singular values are
# at least 1e-3 (Amsel et al. 2025, arXiv 2505.16932). Its coefficients are from modded-nanogpt.
# They are results of the paper's algorithm for five iterations, with a cushion of 0.02 and a safety
# factor of 1.02 for rounding.
POLYNOMIALS = {
    "newton_schulz": 5 * ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}

# The root mean square of an update's entries. AdamW's updates have about the same root mean square,
# so AdamW's learning rates and weight decay also suit Muon (Liu et al. 2025, arXiv 2502.16982,
# section 2.2).
UPDATE_RMS = 0.2


class MuonState(NamedTuple):
    """The state of `scale_by_muon`. Each tree has the same paths as the parameters."""

    count: Array  # type: ignore[assignment]  # int32, number of updates so far
    momentum: Tree  # running means of gradients, with the parameters' shapes and dtypes
    # For NorMuon, the running mean square of each neuron's orthogonalised updates: float32
    # [..., outputs], where the leading axes enumerate the matrices. For Muon, None.
    neurons: Tree


def scale_by_muon(
    optim: OptimConfig, parameters: Tree, matrices: Matrices = Matrices()
) -> optax.GradientTransformation:
    """Return Muon (Jordan et al. 2024) or NorMuon (Li et al. 2025), without a learning rate.

    Muon's updates are scaled as with `match_rms_adamw` of torch.optim.Muon. NorMuon (algorithm 1 of
    the paper) divides the update of each output neuron by the running root mean square of the
    neuron's updates. `parameters` is a tree of `ParamInfo`. This tree, and the trees of gradients,
    must contain only matrices. `matrices` assigns whole matrices to devices.
    """
    neurons = optim.name == "normuon"
    momentum = momentum_schedule(optim)

    def init(params: Tree) -> MuonState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        squares = None
        if neurons:
            squares = jax.tree.map(_zeros, parameters, params)
        return MuonState(jnp.int32(0), zeros, squares)

    def update(
        updates: Tree, state: MuonState, params: Tree = None
    ) -> tuple[Tree, MuonState]:
        del params
        shapes = jax.tree.map(Kernel.of, parameters, updates)
        beta = momentum(state.count)
        move = partial(_lerp, weight=1 - beta)
        mean = jax.tree.map(move, state.momentum, updates)
        look_ahead = partial(_lerp, weight=beta)
        ahead = jax.tree.map(look_ahead, updates, mean)
        # GPUs and TPUs multiply in bfloat16, as in the authors' code.
        narrow = None if matrices.platform == "cpu" else jnp.bfloat16
        moved = ahead if optim.nesterov else mean
        operands = jax.tree.map(Kernel.to_matrices, shapes, moved)
        operands = jax.tree.map(lambda x: x.astype(narrow or x.dtype), operands)
        orthogonalize = partial(_orthogonalize, method=optim.orthogonalize)
        orthogonal, *squares = map_stacks(matrices, orthogonalize, (operands,))
        orthogonal = jax.tree.map(
            lambda x, like: x.astype(like.dtype), orthogonal, updates
        )
        if neurons:
            mean_square = partial(_mean_square, beta2=optim.beta2)
            running = jax.tree.map(mean_square, shapes, state.neurons, *squares)
            scaled = jax.tree.map(_normalize, shapes, orthogonal, running, *squares)
        else:
            # The entries of an orthogonal matrix have a root mean square of 1 / sqrt(longer side)
            # (Liu et al. 2025, lemma 1).
            running = None
            scaled = jax.tree.map(
                lambda kernel, x: x * (UPDATE_RMS * max(kernel.sides) ** 0.5),
                shapes,
                orthogonal,
            )
        direction = jax.tree.map(Kernel.from_matrices, shapes, scaled)
        count = optax.safe_increment(state.count)
        return direction, MuonState(count, mean, running)

    return optax.GradientTransformation(init, update)


def momentum_schedule(optim: OptimConfig) -> optax.Schedule:
    """Return the coefficient of the momentum as a function of the step, counted from 0.

    With `optim.momentum_warmup`, it rises linearly from 0.85 to `optim.momentum` in that number of
    steps.
    """
    if steps := optim.momentum_warmup:  # starts at 0.85, as in modded-nanogpt
        return optax.linear_schedule(0.85, optim.momentum, steps)
    return optax.constant_schedule(optim.momentum)


def muon_update(matrices: Array, method: str, platform: str) -> Array:
    """Return Muon's updates for the momenta of S matrices, `[S, m, n]`.

    The entries of each update have about the root mean square `UPDATE_RMS`. `method` is a key of
    `POLYNOMIALS`. Unless `platform` is `cpu`, products are computed in bfloat16.
    """
    dtype = matrices.dtype if platform == "cpu" else jnp.bfloat16
    orthogonal = orthogonalized(matrices.astype(dtype), method)
    scale = UPDATE_RMS * max(matrices.shape[1:]) ** 0.5
    return orthogonal.astype(matrices.dtype) * scale


def orthogonalized(matrices: Array, method: str) -> Array:
    """Orthogonalise S matrices `[S, m, n]`: change their singular values to about 1.

    `method` is a key of `POLYNOMIALS`. Singular values above 0.0015 times the Frobenius norm become
    0.68 to 1.21 with `newton_schulz`, and 0.85 to 1.15 with `polar_express`.
    """
    if matrices.shape[1] > matrices.shape[2]:  # use the smaller Gram matrix
        return orthogonalized(matrices.mT, method).mT
    dtype = matrices.dtype
    wide = jnp.promote_types(dtype, jnp.float32)

    def product(x: Array, y: Array) -> Array:
        return jnp.matmul(
            x.astype(dtype),
            y.astype(dtype),
            preferred_element_type=wide,
        )

    x = matrices.astype(wide)
    norm = jnp.linalg.norm(x, axis=(1, 2), keepdims=True)
    x = x / jnp.maximum(norm, 1e-7)  # a matrix of zeros remains 0
    for a, b, c in POLYNOMIALS[method]:
        gram = product(x, x.mT)
        linear = a * x
        polynomial = b * gram + c * product(gram, gram)
        x = linear + product(polynomial, x)
    return x.astype(dtype)


def _orthogonalize(stacks: tuple[Array], method: str) -> tuple[Array, ...]:
    """Return orthogonalised matrices, and the mean squares of their rows and their columns.

    The shapes are `[S, m, n]`, `[S, m, 1]` and `[S, 1, n]`. `method` is a key of `POLYNOMIALS`.
    XLA does not compute the results that the caller ignores.
    """
    x = orthogonalized(*stacks, method)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    square = jnp.square(x.astype(dtype))
    rows = square.mean(axis=2, keepdims=True)
    columns = square.mean(axis=1, keepdims=True)
    return x, rows, columns


def _zeros(info: ParamInfo, x: Array) -> Array:
    """Return zeros `[..., outputs]`, the initial running mean squares of a kernel's neurons."""
    kernel = Kernel.of(info, x)
    number = kernel.sides[kernel.outputs]
    shape = (*kernel.counts, number)
    return jnp.zeros(shape, x.dtype)


def _mean_square(
    kernel: Kernel,
    old: Array,
    *squares: Array,
    beta2: float,
) -> Array:
    """Return the updated running mean squares of a kernel's neurons.

    `squares` holds the mean squares of the rows and of the columns. `kernel.outputs` says whether
    the neurons are the rows or the columns.
    """
    square = squares[kernel.outputs]
    square = square.reshape(old.shape)
    return _lerp(old, square, 1 - beta2)


def _normalize(
    kernel: Kernel,
    matrices: Array,
    running: Array,
    *squares: Array,
) -> Array:
    """Divide the update of each neuron (a row or a column) by its running root mean square.

    Then scale each matrix so that its entries have the root mean square `UPDATE_RMS`. The mean
    square of a matrix is computed from the mean squares of its neurons, so no device needs a whole
    matrix. `squares` holds the mean squares of the rows and of the columns.
    """
    square = squares[kernel.outputs]
    # 1e-10 is the epsilon of the authors' code. It avoids 0 / 0 if a neuron's updates are all 0.
    divisor = jnp.sqrt(running).reshape(square.shape) + 1e-10
    relative = square / jnp.square(divisor)
    mean = jnp.mean(relative, axis=(1, 2), keepdims=True)
    rms = jnp.sqrt(jnp.maximum(mean, 1e-30))
    return matrices * (UPDATE_RMS / (divisor * rms))


def _lerp(x: Array, y: Array, weight: jax.typing.ArrayLike) -> Array:
    return x + weight * (y - x)
