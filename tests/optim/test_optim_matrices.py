"""Muon, NorMuon and SOAP: the papers' formulas on a model's kernels, wherever these are stored."""

import dataclasses
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from gpt2.config import GPTConfig, OptimConfig, ParallelConfig
from gpt2.lab.plan.collectives import collectives
from gpt2.model import GPT
from gpt2.optim import muon
from gpt2.optim.muon import scale_by_muon
from gpt2.optim.soap import scale_by_soap
from gpt2.optim.stacks import matrices_of
from gpt2.parallel import rules
from gpt2.parallel.matrices import Matrices
from gpt2.parallel.mesh import make_mesh
from gpt2.utils.scan import in_layout
from tests.helpers import by_name, thorough

RULES = rules.Rules.from_config(ParallelConfig())
PLAIN = GPTConfig(
    vocab_size=50, context_length=16, num_layers=4, num_heads=4, embed_dim=32
)
SMALL = dataclasses.replace(
    PLAIN, num_layers=2, num_kv_heads=2, activation="swiglu", mlp_dim=128
)
MESH = make_mesh(ParallelConfig(data=1, fsdp=4, tensor=2))
NUM_STEPS = 10
MOMENTUM = 0.95
BETA1 = 0.9
BETA2 = 0.95
EPS = 1e-8
EVERY = 4
WARMUP = 6
DTYPES = ("float32", "float64")
TOLERANCE = 1e-5  # of the largest entry
# In float32 SOAP magnifies rounding: its first basis by the gaps between eigenvalues, and its first
# direction where an entry is near 0, since Adam takes the sign. float64 shows that this is all.

MUON = dict(name="muon", momentum=MOMENTUM, beta2=BETA2)
SOAP = dict(name="soap", beta1=BETA1, beta2=BETA2, eps=EPS, precondition_every=EVERY)


def muon_with(**options):
    return partial(scale_by_muon, OptimConfig(**MUON | options))


# Functions of what the matrices declare.
OPTIMIZERS = {
    "muon": muon_with(),
    "muon without nesterov": muon_with(nesterov=False),
    "muon by polar express": muon_with(orthogonalize="polar_express"),
    "normuon": muon_with(name="normuon"),
    "muon, its momentum warmed up": muon_with(momentum_warmup=WARMUP),
    "soap": partial(scale_by_soap, OptimConfig(**SOAP)),
}


def matrices_in(config, scanned=False):
    """Returns what the matrices of a model declare."""
    model = GPT(dataclasses.replace(config, scan_layers=scanned))
    return matrices_of(model.parameters())


def hidden(tree):
    """Returns a model's tree with everything masked but the kernels of its layers."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x if path[-1].key == "kernel" else optax.MaskedNode(), tree
    )


def gradients(step, config=SMALL, dtype="float32"):
    """Returns gradients of all hidden kernels, unrolled, with neurons of unequal size."""
    model = GPT(config)
    shapes = jax.eval_shape(
        model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
    )["params"]
    rng = np.random.default_rng(step)

    def draw(shape):
        scales = np.exp(rng.standard_normal(shape.shape[-1:]) / 2)
        return jnp.asarray(rng.standard_normal(shape.shape) * scales, dtype)

    return jax.tree.map(draw, hidden(shapes))


def directions(make_optimizer, *, dtype="float32", scanned=False):
    """Returns the directions of all steps by name, as numpy."""
    optimizer = make_optimizer(matrices_in(SMALL, scanned))
    grads = [
        in_layout(gradients(step, SMALL, dtype), scanned=scanned)
        for step in range(NUM_STEPS)
    ]
    state = optimizer.init(grads[0])
    update = jax.jit(optimizer.update)
    steps = []
    for grad in grads:
        direction, state = update(grad, state)
        steps.append(named(direction))
    return {name: np.stack([step[name] for step in steps]) for name in steps[0]}


def named(tree):
    """Returns the leaves of a tree in either layout by name, unrolled, as numpy."""
    return by_name(in_layout(tree, scanned=False))


def difference(found, wanted):
    """Returns the largest difference of an entry, over the largest entry of its kernel."""
    assert found.keys() == wanted.keys()
    return max(
        np.abs(found[k] - wanted[k]).max() / np.abs(wanted[k]).max() for k in wanted
    )


# The formulas, in float64, for one matrix [inputs, outputs].


def split(name, kernel):
    """Returns the matrices of an unrolled kernel, each [inputs, outputs] in float64."""
    kernel = np.asarray(kernel, np.float64)
    if "c_attn" in name or "c_kv" in name:  # [D, several, N, H]
        return [kernel[:, i].reshape(len(kernel), -1) for i in range(kernel.shape[1])]
    if "attn/c_proj" in name:  # [N, H, D]
        return [kernel.reshape(-1, kernel.shape[-1])]
    return [kernel.reshape(len(kernel), -1)]


def join(name, matrices, shape):
    """Returns the kernel of some matrices: the inverse of `split`."""
    if "c_attn" in name or "c_kv" in name:
        return np.stack(matrices, axis=1).reshape(shape)
    return matrices[0].reshape(shape)


def polar_express(least=1e-3, cushion=0.02, safety=1.02):
    """The paper's five polynomials: each the nearest to 1 where the ones before it may end.

    It differs from 1 by as much, up and down in turn, at both ends and at two points between.
    """
    most = 1.0
    polynomials = []
    for step in range(5):
        start = max(least, cushion * most)
        low = (3 * start + most) / 4
        high = (start + 3 * most) / 4
        for _ in range(50):  # Remez: the points move to where the polynomial turns
            points = np.array([start, low, high, most])
            terms = [points, points**3, points**5, np.array([1, -1, 1, -1])]
            a, b, c, _ = np.linalg.solve(np.stack(terms, axis=1), np.ones(4))
            turns = (-3 * b + np.array([-1, 1]) * np.sqrt(9 * b**2 - 20 * a * c)) / (
                10 * c
            )
            low, high = np.sqrt(turns)
        ends = [a * x + b * x**3 + c * x**5 for x in (least, most)]
        factor = (
            2 / sum(ends) if start > least else 1.0
        )  # around 1 again, from `least` on
        safe = safety if step < 4 else 1.0
        a, b, c = factor * a / safe, factor * b / safe**3, factor * c / safe**5
        polynomials.append((a, b, c))
        least = a * least + b * least**3 + c * least**5
        most = 2 - least
    return polynomials


def orthogonalized(x, polynomials):
    x = x / np.linalg.norm(x)
    for a, b, c in polynomials:
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def plain_muon(
    grads,
    *,
    nesterov=True,
    neurons=False,
    polynomials=5 * [(3.4445, -4.7750, 2.0315)],
    warmup=0,
):
    momentum = 0.0
    mean_square = 0.0
    for step, grad in enumerate(grads):
        beta = MOMENTUM if step >= warmup else 0.85 + (MOMENTUM - 0.85) * step / warmup
        momentum = beta * momentum + (1 - beta) * grad
        ahead = (1 - beta) * grad + beta * momentum
        update = orthogonalized(ahead if nesterov else momentum, polynomials)
        if not neurons:
            yield 0.2 * math.sqrt(max(grad.shape)) * update
            continue
        # Algorithm 1 of the paper, whose matrices are [outputs, inputs].
        update = update.T
        mean_square = BETA2 * mean_square + (1 - BETA2) * np.mean(
            update * update, axis=1
        )
        update = update / (np.sqrt(mean_square)[:, None] + 1e-10)
        yield (0.2 * math.sqrt(update.size) / np.linalg.norm(update) * update).T


def plain_soap(grads):
    """The authors' SOAP without weight decay; a first basis is completed as ours is."""
    mu = nu = 0.0
    grams = [0.0, 0.0]
    bases = [None, None]
    for step, grad in enumerate(grads):
        if step == 0:
            yield np.zeros_like(grad)
        else:
            mu = BETA1 * mu + (1 - BETA1) * grad
            nu = BETA2 * nu + (1 - BETA2) * (bases[0].T @ grad @ bases[1]) ** 2
            adam = bases[0].T @ mu @ bases[1] / (np.sqrt(nu) + EPS)
            correction = math.sqrt(1 - BETA2**step) / (1 - BETA1**step)
            yield correction * bases[0] @ adam @ bases[1].T
        for side, square in enumerate((grad @ grad.T, grad.T @ grad)):
            grams[side] = BETA2 * grams[side] + (1 - BETA2) * square
            if step == 0:
                vectors = np.linalg.eigh(grams[side])[1][:, ::-1][:, : min(grad.shape)]
                full = len(square) == vectors.shape[1]
                bases[side] = (
                    vectors if full else np.linalg.qr(vectors, mode="complete")[0]
                )
            elif step % EVERY == 0:
                eigenvalues = np.diag(bases[side].T @ grams[side] @ bases[side])
                order = np.argsort(-eigenvalues)
                bases[side] = np.linalg.qr(grams[side] @ bases[side][:, order])[0]
                nu = nu[order] if side == 0 else nu[:, order]


FORMULAS = {
    "muon": plain_muon,
    "muon without nesterov": partial(plain_muon, nesterov=False),
    "muon by polar express": partial(plain_muon, polynomials=polar_express()),
    "normuon": partial(plain_muon, neurons=True),
    "muon, its momentum warmed up": partial(plain_muon, warmup=WARMUP),
    "soap": plain_soap,
}


def formula(name, dtype):
    """Returns what the formula `name` gives for all steps on gradients of a type, by kernel."""
    grads = [named(gradients(step, dtype=dtype)) for step in range(NUM_STEPS)]
    result = {}
    for kernel, first in grads[0].items():
        matrices = zip(*(split(kernel, g[kernel]) for g in grads), strict=True)
        by_matrix = [list(FORMULAS[name](each)) for each in matrices]
        steps = zip(*by_matrix, strict=True)
        result[kernel] = np.stack([join(kernel, each, first.shape) for each in steps])
    return result


@pytest.mark.parametrize(
    "name", [thorough(n) if n == "muon without nesterov" else n for n in OPTIMIZERS]
)
@pytest.mark.parametrize(
    ("dtype", "scanned"), [("float64", False), *(thorough(d, True) for d in DTYPES)]
)
def test_ten_steps_equal_the_papers_formula(name, dtype, scanned):
    with jax.enable_x64(dtype == "float64"):
        found = directions(OPTIMIZERS[name], dtype=dtype, scanned=scanned)
        wanted = formula(name, dtype)
    exact = (
        dtype == "float64" and "warmed up" not in name
    )  # optax's schedules are float32
    # Polar express begins twice as steeply as Newton-Schulz, and rounding grows with it.
    loose = {"soap": 1e-3, "muon by polar express": 2 * TOLERANCE}
    assert difference(found, wanted) < (1e-10 if exact else loose.get(name, TOLERANCE))


def test_polar_express_ends_nearer_to_orthogonal_than_newton_schulz():
    rows = np.geomspace(1.0, 0.01, 32)[:, None]
    matrices = np.float32(rows * np.random.default_rng(0).standard_normal((4, 32, 128)))
    least = np.linalg.svd(matrices)[1].min(1) / np.linalg.norm(matrices, axis=(1, 2))
    assert (least > 0.0015).all() and (least < 0.005).all()

    def distance(method):
        return jnp.abs(jnp.linalg.svd(muon.orthogonalized(matrices, method))[1] - 1)

    newton_schulz, polar_express = map(distance, ("newton_schulz", "polar_express"))
    assert 0.3 < newton_schulz.max() < 0.32 and polar_express.max() < 0.142
    assert polar_express.mean() < 0.6 * newton_schulz.mean()


def test_a_matrix_crosses_each_axis_once_in_and_out_and_no_device_holds_them_all():
    config = PLAIN
    mesh = MESH
    optimizer = muon_with()(matrices_in(config), Matrices(mesh))
    specs = hidden(rules.specs(GPT(config).logical_axes(), RULES.storage))
    shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
    grads = jax.device_put(gradients(0, config), shardings)

    @jax.jit
    def update(grads, state):  # as the pjit backend traces it
        return optimizer.update(grads, state)

    text = (
        update.lower(grads, jax.eval_shape(optimizer.init, grads)).compile().as_text()
    )
    square, wide = 4 * 4, 4 * 2  # matrices [32, 32] and [32, 128] of four layers
    sizes = [
        4 * square * 32 * 32 // 8,
        4 * wide * 32 * 128 // 8,
    ]  # bytes on each device
    found = collectives(text)
    assert {c.kind for c in found} == {"all-to-all"}
    for devices in (4, 2):  # of `fsdp` and of `tensor`
        moved = [c.bytes * c.times for c in found if len(c.group) == devices]
        assert sorted(moved) == sorted(2 * sizes)
    arrays = re.findall(r"\bf32\[([\d,]+)\]", text)
    largest = max(math.prod(map(int, dims.split(","))) for dims in arrays)
    assert (
        largest == 32 * 128
    )  # one of the eight wide matrices, while the stack has 8 times that


@pytest.mark.thorough
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_multiply_in_bfloat16_and_add_up_in_float32(platform):
    wanted = directions(OPTIMIZERS["muon"])
    on_platform = partial(muon_with(), matrices=Matrices(platform=platform))
    found = directions(on_platform)
    assert all(x.dtype == np.float32 for x in found.values())
    assert 1e-4 < difference(found, wanted) < 0.1
    grads = gradients(0)
    optimizer = on_platform(matrices_in(SMALL))
    jaxpr = str(jax.make_jaxpr(optimizer.update)(grads, optimizer.init(grads)))
    products = re.findall(r"preferred_element_type=(\w+)", jaxpr)
    assert len(products) == 3 * 15 and set(products) == {"float32"}
    assert "bf16[6,32,128]" in jaxpr


@pytest.mark.parametrize(
    "name", ["normuon", *(thorough(n) for n in OPTIMIZERS if n != "normuon")]
)
def test_gradients_of_zero_give_a_direction_of_zero(name):
    zeros = jax.tree.map(jnp.zeros_like, gradients(0))
    optimizer = OPTIMIZERS[name](matrices_in(SMALL))
    state = optimizer.init(zeros)
    for _ in range(2):
        direction, state = optimizer.update(zeros, state)
        assert not any(x.any() for x in named(direction).values())
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state))
