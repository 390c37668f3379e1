"""Muon, NorMuon, SOAP and their like: the papers' formulas on a model's kernels."""

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
from gpt2.utils.parameters import ParamInfo
from gpt2.utils.scan import in_layout
from tests.helpers import thorough
from tests.optim.updates import difference, unrolled

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
TOLERANCE = 1e-5  # of the largest entry
# In float32 SOAP magnifies rounding: its first basis by the gaps between eigenvalues, and its first
# direction where an entry is near 0, since Adam takes the sign. float64 shows that this is all.
# In SOAP-Muon, Newton-Schulz magnifies this further: small singular values by up to 3.4^5.
# Polar Express begins twice as steeply as Newton-Schulz, and rounding grows with it.
LOOSE = {"soap": 1e-3, "soap_muon": 1e-2, "normuon by polar express": 2 * TOLERANCE}

SOAP = dict(name="soap", beta1=BETA1, beta2=BETA2, eps=EPS, precondition_every=EVERY)
ONE_MATRIX = {"w": ParamInfo(("embed", "mlp"), inputs=(-2,))}


def muon_with(name="muon", **options):
    optim = OptimConfig(name=name, momentum=MOMENTUM, beta2=BETA2, **options)
    return partial(scale_by_muon, optim)


# Functions of what the matrices declare.
OPTIMIZERS = {
    "muon": muon_with(),
    "muon without nesterov": muon_with(nesterov=False),
    "muon, its momentum warmed up": muon_with(momentum_warmup=WARMUP),
    "normuon by polar express": muon_with("normuon", orthogonalize="polar_express"),
    "soap": partial(scale_by_soap, OptimConfig(**SOAP)),
    "soap_muon": partial(
        scale_by_soap, OptimConfig(**SOAP | dict(name="soap_muon", momentum=MOMENTUM))
    ),
}
# The other optimizers contain what these show, but for `soap_muon`, which a single matrix tests.
CONTAINED = ("muon", "muon without nesterov", "soap_muon")


def matrices_in(config, scanned=False):
    """Return what the matrices of a model declare."""
    model = GPT(dataclasses.replace(config, scan_layers=scanned))
    return matrices_of(model.parameters())


def hidden(tree):
    """Return a model's tree with everything masked but the kernels of its layers."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x if path[-1].key == "kernel" else optax.MaskedNode(), tree
    )


def gradients(step, config=SMALL, dtype="float32"):
    """Return gradients of all hidden kernels, unrolled, with neurons of unequal size."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(GPT(config).init, jax.random.key(0), tokens)
    rng = np.random.default_rng(step)

    def draw(leaf):
        scales = np.exp(rng.standard_normal(leaf.shape[-1:]) / 2)
        return jnp.asarray(scales * rng.standard_normal(leaf.shape), dtype)

    return jax.tree.map(draw, hidden(shapes["params"]))


def directions(make_optimizer, dtype="float32", scanned=False):
    """Return the directions of all steps, with kernels by name."""
    optimizer = make_optimizer(matrices_in(SMALL, scanned))
    state = optimizer.init(in_layout(gradients(0, dtype=dtype), scanned=scanned))
    update = jax.jit(optimizer.update)
    steps = []
    for step in range(NUM_STEPS):
        grads = in_layout(gradients(step, dtype=dtype), scanned=scanned)
        direction, state = update(grads, state)
        steps.append(unrolled(direction))
    return steps


# The formulas, in float64, for one matrix [inputs, outputs].


def split(name, kernel):
    """Return the matrices of an unrolled kernel, each `[inputs, outputs]`, stacked."""
    if "c_attn" in name or "c_kv" in name:  # [D, several, N, H]
        several = np.moveaxis(kernel, 1, 0)
        return several.reshape(*several.shape[:2], -1)
    if "attn/c_proj" in name:  # [N, H, D]
        return kernel.reshape(1, -1, kernel.shape[-1])
    return kernel.reshape(1, len(kernel), -1)


NEWTON_SCHULZ = 5 * [(3.4445, -4.7750, 2.0315)]
# As modded-nanogpt and nanochat publish them.
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def orthogonalized(x, polynomials):
    x = x / np.linalg.norm(x)
    for a, b, c in polynomials:
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def momenta(grads, nesterov=True, warmup=0):
    momentum = 0.0
    for step, grad in enumerate(grads):
        beta = MOMENTUM
        if step < warmup:
            beta = 0.85 + (MOMENTUM - 0.85) * step / warmup
        momentum = beta * momentum + (1 - beta) * grad
        ahead = (1 - beta) * grad + beta * momentum
        yield ahead if nesterov else momentum


def plain_muon(grads, **options):
    for momentum in momenta(grads, **options):
        rms = 0.2 * math.sqrt(max(momentum.shape))
        yield rms * orthogonalized(momentum, NEWTON_SCHULZ)


def plain_normuon(grads):
    """Algorithm 1 of the paper, whose matrices are [outputs, inputs]."""
    mean_square = 0.0
    for momentum in momenta(grads):
        update = orthogonalized(momentum, POLAR_EXPRESS).T
        square = np.mean(update**2, axis=1)
        mean_square = BETA2 * mean_square + (1 - BETA2) * square
        update = update / (np.sqrt(mean_square)[:, None] + 1e-10)
        rms = 0.2 * math.sqrt(update.size) / np.linalg.norm(update)
        yield rms * update.T


def first_basis(gram, rank):
    """Return the eigenvectors, largest eigenvalue first, completed as ours are."""
    _, vectors = np.linalg.eigh(gram)
    vectors = vectors[:, ::-1][:, :rank]
    if rank == len(gram):
        return vectors
    basis, _ = np.linalg.qr(vectors, mode="complete")
    return basis


def plain_soap(grads, moments=None):
    """The authors' SOAP without weight decay.

    With `moments`, SOAP-Muon's preconditioned moments, before they are orthogonalised.
    """
    mu = 0.0
    nu = 0.0
    grams = [0.0, 0.0]
    bases = [None, None]
    for step, grad in enumerate(grads):
        if step == 0:
            yield np.zeros_like(grad) if moments is None else moments[0]
        else:
            rows, columns = bases
            mu = BETA1 * mu + (1 - BETA1) * grad
            moment = mu if moments is None else moments[step]
            squared = grad if moments is None else moment
            nu = BETA2 * nu + (1 - BETA2) * (rows.T @ squared @ columns) ** 2
            adam = rows.T @ moment @ columns / (np.sqrt(nu) + EPS)
            correction = math.sqrt(1 - BETA2**step) / (1 - BETA1**step)
            yield correction * rows @ adam @ columns.T
        for side, square in enumerate((grad @ grad.T, grad.T @ grad)):
            grams[side] = BETA2 * grams[side] + (1 - BETA2) * square
            if step == 0:
                bases[side] = first_basis(grams[side], min(grad.shape))
            elif step % EVERY == 0:
                eigenvalues = np.diag(bases[side].T @ grams[side] @ bases[side])
                order = np.argsort(-eigenvalues)
                bases[side], _ = np.linalg.qr(grams[side] @ bases[side][:, order])
                nu = np.take(nu, order, axis=side)


def plain_soap_muon(grads):
    moments = [*momenta(grads)]
    for preconditioned in plain_soap(grads, moments):
        rms = 0.2 * math.sqrt(max(preconditioned.shape))
        yield rms * orthogonalized(preconditioned, NEWTON_SCHULZ)


FORMULAS = {
    "muon": plain_muon,
    "muon without nesterov": partial(plain_muon, nesterov=False),
    "muon, its momentum warmed up": partial(plain_muon, warmup=WARMUP),
    "normuon by polar express": plain_normuon,
    "soap": plain_soap,
    "soap_muon": plain_soap_muon,
}


@pytest.mark.parametrize(
    "name", [thorough(name) if name in CONTAINED else name for name in OPTIMIZERS]
)
@pytest.mark.parametrize(
    ("dtype", "scanned"), [("float64", False), thorough("float32", True)]
)
def test_ten_steps_equal_the_papers_formula(name, dtype, scanned):
    with jax.enable_x64(dtype == "float64"):
        found = directions(OPTIMIZERS[name], dtype, scanned)
        steps = [unrolled(gradients(step, dtype=dtype)) for step in range(NUM_STEPS)]
    tolerance = LOOSE.get(name, TOLERANCE)
    if dtype == "float64" and "warmed up" not in name:  # optax's schedules are float32
        tolerance = 1e-10
    for kernel in steps[0]:
        grads = np.stack([split(kernel, step[kernel]) for step in steps])
        actual = np.stack([split(kernel, step[kernel]) for step in found])
        for matrix in range(grads.shape[1]):
            expected = [*FORMULAS[name](grads[:, matrix])]
            atol = tolerance * np.abs(expected).max()
            np.testing.assert_allclose(actual[:, matrix], expected, rtol=0, atol=atol)


def test_steps_of_soap_muon_for_one_matrix_equal_the_formula():
    rng = np.random.default_rng(0)
    grads = rng.standard_normal((NUM_STEPS, 4, 6))
    with jax.enable_x64(True):
        optimizer = OPTIMIZERS["soap_muon"](ONE_MATRIX)
        state = optimizer.init({"w": jnp.zeros((4, 6))})
        update = jax.jit(optimizer.update)
        for grad, expected in zip(grads, plain_soap_muon(grads), strict=True):
            direction, state = update({"w": grad}, state)
            np.testing.assert_allclose(direction["w"], expected, rtol=0, atol=1e-10)


def test_polar_express_ends_nearer_to_orthogonal_than_newton_schulz():
    # Of a norm of 1.02; each polynomial of a diagonal matrix acts on its entries.
    values = np.array([1.0, 0.2, 0.03, 0.005, 0.0016], np.float32)

    def distance(method):
        (result,) = muon.orthogonalized(jnp.diag(values)[None], method)
        return jnp.abs(jnp.diag(result) - 1).max()

    assert distance("polar_express") < 0.15
    assert 0.2 < distance("newton_schulz") < 0.32


def test_a_matrix_crosses_each_axis_once_in_and_out_and_no_device_holds_them_all():
    optimizer = muon_with()(matrices_in(PLAIN), Matrices(MESH))
    specs = hidden(rules.specs(GPT(PLAIN).logical_axes(), RULES.storage))
    shardings = jax.tree.map(partial(NamedSharding, MESH), specs)
    grads = jax.device_put(gradients(0, PLAIN), shardings)
    state = jax.eval_shape(optimizer.init, grads)

    def update(grads, state):  # as the pjit backend traces it
        return optimizer.update(grads, state)

    text = jax.jit(update).lower(grads, state).compile().as_text()
    # Bytes on each of 8 devices, of matrices [32, 32] and [32, 128] of four layers.
    square = 4 * 4 * 4 * 32 * 32 // 8
    wide = 4 * 4 * 2 * 32 * 128 // 8
    found = collectives(text)
    assert {collective.kind for collective in found} == {"all-to-all"}
    for devices in (4, 2):  # of `fsdp` and of `tensor`
        group = [c for c in found if len(c.group) == devices]
        moved = [collective.bytes * collective.times for collective in group]
        assert sorted(moved) == sorted(2 * [square, wide])
    sizes = []
    for dims in re.findall(r"\bf32\[([\d,]+)\]", text):
        sizes.append(math.prod(map(int, dims.split(","))))
    # One of the eight wide matrices; the stack of all has 8 times that.
    assert max(sizes) == 32 * 128


@pytest.mark.thorough
def test_accelerators_multiply_in_bfloat16_and_add_up_in_float32():
    on_gpu = partial(muon_with(), matrices=Matrices(platform="gpu"))
    (found, *_) = directions(on_gpu)
    (expected, *_) = directions(muon_with())
    assert 1e-4 < difference(found, expected) < 0.1
    grads = gradients(0)
    optimizer = on_gpu(matrices_in(SMALL))
    program = str(jax.make_jaxpr(optimizer.update)(grads, optimizer.init(grads)))
    products = re.findall(r"preferred_element_type=(\w+)", program)
    assert len(products) == 3 * 15
    assert set(products) == {"float32"}
    assert "bf16[6,32,128]" in program


@pytest.mark.parametrize("name", ["normuon by polar express", "soap"])
def test_gradients_of_zero_give_a_direction_of_zero(name):
    zeros = {"w": jnp.zeros((4, 8))}
    optimizer = OPTIMIZERS[name](ONE_MATRIX)
    update = jax.jit(optimizer.update)
    state = optimizer.init(zeros)
    for _ in range(2):
        direction, state = update(zeros, state)
        assert not direction["w"].any()
    for leaf in jax.tree.leaves(state):
        assert jnp.isfinite(leaf).all()
