"""The fast form of every operation equals its plain reference, values and gradients."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gpt2.config import ParallelConfig
from gpt2.errors import UserError
from gpt2.model import attention as model_attention
from gpt2.ops import (
    ACTIVATIONS,
    Scoring,
    alibi_slopes,
    attention,
    cross_entropy,
    cross_entropy_reference,
    gelu_tanh,
    gelu_tanh_reference,
    linear,
    linear_parts,
    linear_reference,
    norm,
    norm_reference,
)
from gpt2.ops.attention import attention_cached, attention_reference, resolve, softmax
from gpt2.parallel import rules
from gpt2.parallel.mesh import make_mesh
from gpt2.parallel.rules import BATCH_AXES, Rules, spread_over
from gpt2.plan.collectives import collectives
from gpt2.utils.platform import tracing
from tests.helpers import thorough

cross_entropy_module = importlib.import_module(
    "gpt2.ops.cross_entropy"
)  # not the function
RULES = Rules.from_config(ParallelConfig())
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def assert_close(actual, expected, dtype="float32"):
    """Agreement relative to the largest entry: narrow types round each entry, not each sum."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype
        a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
        np.testing.assert_allclose(
            a, e, rtol=0, atol=TOLERANCE[dtype] * max(1, np.abs(e).max())
        )


def weighted(op, *shape):
    """Turns an operation into a scalar function whose gradient reaches every output entry."""
    return lambda *args: (op(*args) * normal(9, *shape)).sum().astype(jnp.float32)


def assert_equal(fast, plain, args, dtype):
    """Agreement of two operations: of their values, types, and gradients of all arguments."""

    def both(op):
        def scalar(*args):
            value = op(*args)
            return weighted(lambda: value, *value.shape)(), value

        every = tuple(range(len(args)))
        gradients, value = jax.jit(jax.grad(scalar, every, has_aux=True))(*args)
        return value, gradients

    assert_close(both(fast), both(plain), dtype)


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "bias", "activation"),
    [
        *((9, 7, "float32", bias, gelu_tanh) for bias in (False, True)),
        (1, 1, "bfloat16", True, jnp.tanh),
        (8, 2, "float16", False, None),
    ],
)
def test_linear_equals_tensordot_and_its_derivative(
    rows, width, dtype, bias, activation
):
    options = dict(dtype=dtype, activation=activation)
    x, kernel = normal(0, 2, rows, 5), normal(1, 5, 3, 2, width)
    args = (x, kernel) + ((normal(2, 3, 2, width),) if bias else ())
    assert linear(*args, **options).dtype == dtype
    assert_equal(
        partial(linear, **options), partial(linear_reference, **options), args, dtype
    )


def test_linear_keeps_the_input_of_its_activation_and_not_the_value():
    x, kernel = normal(0, 64, 32), normal(1, 32, 16)
    _, backward = jax.vjp(lambda x: linear(x, kernel, activation=gelu_tanh), x)
    kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.shape == x.shape]
    assert len(kept) == 1 and (kept[0] == x).all()


@pytest.mark.parametrize(
    ("rows", "width", "mean", "kind", "dtypes"),
    [
        (9, 40, 10.0, "layernorm", ("float32", "float32")),
        (9, 40, 10.0, "layernorm without bias", ("float32", "float32")),
        (1, 2, 0.0, "layernorm", ("bfloat16", "float32")),
        (4, 31, 0.0, "rmsnorm", ("float32", "float16")),
    ],
)
def test_norm_equals_reference(rows, width, mean, kind, dtypes, shift=0.0):
    x = (normal(0, 2, rows, width) + mean).astype(dtypes[0])
    args = (x, 1 + normal(1, width)) + (
        (normal(2, width),) if kind == "layernorm" else ()
    )
    options = dict(center=kind != "rmsnorm", dtype=dtypes[1])
    assert norm(*args, **options).dtype == dtypes[1]

    def plain(x, *rest):
        return norm_reference(x - options["center"] * shift, *rest, **options)

    assert_equal(partial(norm, **options), plain, args, max(dtypes, key=TOLERANCE.get))


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_gradients_of_a_norm_of_split_rows_cross_devices_as_sums(monkeypatch, platform):
    mesh = make_mesh(ParallelConfig(data=2, tensor=4))
    rows = NamedSharding(mesh, PartitionSpec("tensor"))
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((8, 16, 32), "float32", sharding=rows)
    vector = jax.ShapeDtypeStruct((32,), "float32", sharding=whole)

    def sent():
        with spread_over(mesh, RULES):
            gradients = jax.jit(
                jax.grad(weighted(norm, *x.shape), (0, 1, 2)),
                out_shardings=(rows, whole, whole),
            )
            return collectives(gradients.lower(x, vector, vector).compile().as_text())

    monkeypatch.setattr(rules, "platform_of", lambda _: platform)
    assert {c.kind for c in sent()} == {"all-reduce"}
    if platform == "gpu":  # what XLA makes of the variant for rows that are whole
        tracing = rules.tracing
        monkeypatch.setattr(
            rules, "tracing", lambda **how: tracing(**how | dict(several=False))
        )
        assert "collective-permute" in {c.kind for c in sent()}


def test_linear_contracts_two_axes():
    x, kernel = normal(0, 2, 5, 3, 4), normal(1, 3, 4, 6)
    expected = np.asarray(x).reshape(2, 5, 12) @ np.asarray(kernel).reshape(12, 6)
    np.testing.assert_allclose(
        linear(x, kernel, num_contract=2), expected, rtol=1e-4, atol=1e-5
    )


def test_linear_kernel_gradient_is_not_rounded_through_bfloat16():
    x, kernel = jnp.ones((257, 1)), jnp.zeros((1, 1))
    gradient = jax.grad(
        lambda w: linear(x, w, dtype=jnp.bfloat16).astype(jnp.float32).sum()
    )
    assert gradient(kernel) == 257  # bfloat16 holds 256 and 258, not 257


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(
    ("batch_size", "length", "heads", "dtype"),
    [
        pytest.param(2, 7, 2, "bfloat16", id="two blocks of four"),
        pytest.param(2, 300, 1, "float32", id="two blocks with padding"),
        thorough(3, 1, 1, "float32", id="one position"),
        thorough(3, 600, 2, "float32", id="groups across sequences"),
        thorough(2, 1030, 4, "float16", id="two groups"),
        thorough(1, 2100, 2, "bfloat16", id="eight blocks"),
    ],
)
def test_blocked_attention_equals_reference(batch_size, length, heads, dtype, mask):
    q, k, v = (normal(i, batch_size, length, heads, 8).astype(dtype) for i in range(3))
    segments = jax.random.randint(jax.random.key(3), (batch_size, length), 0, 4)
    check_attention("blocked", q, k, v, segments if mask else None, dtype)


def check_attention(implementation, q, k, v, segments, dtype, sinks=None, **options):
    def run(op, q, k, v, sinks=None):
        return op(q, k, v, sinks=sinks, segments=segments, **options)

    fast = partial(run, partial(attention, implementation=implementation))
    args = (q, k, v) if sinks is None else (q, k, v, sinks)
    assert_equal(fast, partial(run, attention_reference), args, dtype)


@pytest.mark.parametrize(
    ("implementation", "length", "options"),
    [
        # Blocks of 256: windows that end in the block, in the one before, and at its first key.
        ("blocked", 600, dict(scoring=Scoring(window=7, softcap=0.4, scale=0.7))),
        ("blocked", 600, dict(scoring=Scoring(window=256), slopes=alibi_slopes(4))),
        (
            "blocked",
            600,
            dict(scoring=Scoring(window=301, softcap=2.0), slopes=alibi_slopes(4)),
        ),
        ("blocked", 600, dict(sinks=jnp.array([-1.0, 0.0, 2.0, 9.0]))),
        ("xla", 40, dict(scoring=Scoring(window=7, scale=0.7))),
        ("xla", 40, dict(slopes=alibi_slopes(4))),
        ("splash", 128, dict(scoring=Scoring(window=7, softcap=0.4, scale=0.7))),
        ("splash", 128, dict(sinks=jnp.array([-1.0, 0.0, 2.0, 9.0]))),
    ],
)
def test_attention_of_every_scoring_and_grouped_heads_equals_reference(
    implementation, length, options
):
    q, k, v = (
        normal(0, 2, length, 4, 8),
        normal(1, 2, length, 2, 8),
        normal(2, 2, length, 2, 8),
    )
    segments = jnp.sort(jax.random.randint(jax.random.key(3), (2, length), 0, 3))
    check_attention(implementation, q, k, v, segments, "float32", **options)


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_positions_attend_to_a_cache_as_the_reference_does(dtype, kv_heads, new):
    q = normal(0, 2, 9, 4, 8).astype(dtype)
    k, v = (normal(i, 2, 9, kv_heads, 8).astype(dtype) for i in (1, 2))
    garbage = jnp.full((2, 3, kv_heads, 8), 1e9, dtype)
    caches = [jnp.concatenate([x, garbage], axis=1).swapaxes(1, 2) for x in (k, v)]
    scoring = Scoring(window=4, softcap=2.0)
    how = dict(scoring=scoring, slopes=alibi_slopes(4), sinks=jnp.arange(4.0))
    cached = jax.jit(partial(attention_cached, **how))
    whole = attention_reference(q, k, v, **how)
    assert_close(
        cached(q[:, -new:], *caches, jnp.array([9, 9])), whole[:, -new:], dtype
    )


@pytest.mark.parametrize(
    ("platform", "dtype", "length", "head_size", "scores", "expected"),
    [
        ("cpu", "float32", 1024, 64, {}, "blocked"),
        ("cpu", "float32", 64, 32, {}, "reference"),
        ("cpu", "bfloat16", 1024, 64, dict(scoring=Scoring(softcap=1.0)), "blocked"),
        ("gpu", "bfloat16", 1024, 64, {}, "cudnn"),
        ("gpu", "float32", 1024, 64, {}, "xla"),
        ("gpu", "bfloat16", 1024, 64, dict(scoring=Scoring(window=128)), "cudnn"),
        ("gpu", "bfloat16", 1024, 64, dict(scoring=Scoring(softcap=1.0)), "reference"),
        ("tpu", "bfloat16", 1024, 64, {}, "splash"),
        ("tpu", "bfloat16", 1000, 64, {}, "xla"),
        ("tpu", "bfloat16", 1024, 64, dict(alibi=True), "xla"),
        ("tpu", "bfloat16", 1024, 64, dict(sinks=True), "splash"),
        ("gpu", "bfloat16", 1024, 64, dict(sinks=True), "reference"),
    ],
)
def test_auto_attention_is_what_can_run(
    platform, dtype, length, head_size, scores, expected
):
    sizes = jnp.dtype(dtype), length, head_size
    assert resolve("auto", platform, *sizes, **scores) == expected
    for name in {"cudnn", "splash", "flash3"} - {expected}:
        with pytest.raises(UserError, match=name):
            resolve(name, platform, *sizes, **scores)


@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize("implementation", ["blocked", "splash"])
def test_attention_on_a_mesh_equals_reference(
    monkeypatch, implementation, with_segments
):
    """As the pjit backend computes: each device's rows by themselves, heads split by `tensor`."""
    monkeypatch.setattr(model_attention, "resolve", lambda name, *_, **__: name)
    mesh = make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))
    qkv = tuple(normal(i, 4, 1, 128, 2, 8) for i in range(3))
    segments = jnp.sort(jax.random.randint(jax.random.key(3), (4, 1, 128), 0, 4))

    def gradient(implementation, scale, qkv, segments):
        def scalar(scale):
            out = model_attention.spread_attention(
                *(scale * x for x in qkv),
                implementation=implementation,
                segments=segments if with_segments else None,
                sinks=scale[:, 0],
            )
            return jnp.sin(out).sum()

        return jax.value_and_grad(scalar)(scale)

    scale = jnp.ones((2, 8))
    expected = jax.vmap(partial(gradient, "reference"), in_axes=(None, 0, 0))(
        scale, qkv, segments
    )

    def on_device(*args):
        one = jax.tree.map(lambda x: x[0], args[1:])
        return jax.tree.map(lambda x: x[None], gradient(implementation, args[0], *one))

    rows = PartitionSpec(BATCH_AXES)
    specs = dict(mesh=mesh, in_specs=(PartitionSpec(), rows, rows), out_specs=rows)
    mapped = jax.shard_map(
        on_device, **specs, axis_names=set(BATCH_AXES), check_vma=False
    )
    with spread_over(mesh, RULES):
        computed = jax.jit(mapped)(scale, qkv, segments)
    assert_close(computed, expected)


def test_softmax_equals_jax_and_keeps_its_result_alone(monkeypatch):
    x, dy = jax.random.normal(jax.random.key(0), (2, 3, 5, 64))
    x = x.at[0, 1:].set(-jnp.inf)  # a row that sees one key
    (y, pull), (expected, pull_expected) = (
        jax.vjp(f, x) for f in (softmax, jax.nn.softmax)
    )
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-7)
    np.testing.assert_allclose(pull(dy)[0], pull_expected(dy)[0], rtol=0, atol=1e-6)

    layers, B, T, N, H = 4, 2, 128, 4, 32

    def temporaries():
        def loss(x):
            for _ in range(layers):
                x = x + attention_reference(x, x, x)
            return x.sum()

        compiled = jax.jit(jax.grad(loss)).lower(
            jax.ShapeDtypeStruct((B, T, N, H), float)
        )
        return compiled.compile().memory_analysis().temp_size_in_bytes

    scores = 4 * B * N * T * T  # bytes of a layer's
    before = temporaries()
    monkeypatch.setitem(attention_reference.__globals__, "softmax", jax.nn.softmax)
    assert temporaries() - before > (layers - 1) * scores


@pytest.mark.parametrize(
    ("length", "chunk", "padding", "dtype", "softcap", "extra"),
    [
        (9, 4, 0, "float32", 0.0, dict(z_loss=0.3)),
        (7, 0, 5, "float32", 3.0, dict(z_loss=0.1, label_smoothing=0.2)),
        (1, 3, 2, "bfloat16", 3.0, {}),
        (9, 4, 2, "float32", 3.0, dict(z_loss=0.1, weights=np.float32([0.5, 0.25]))),
    ],
)
def test_cross_entropy_equals_reference(length, chunk, padding, dtype, softcap, extra):
    vocab_size = 11
    hidden, embedding = normal(0, 2, length, 8), normal(1, vocab_size + padding, 8)
    shape = 2, length, *[3] * ("weights" in extra)
    targets = jax.random.randint(jax.random.key(2), shape, -1, vocab_size)
    options = dict(vocab_size=vocab_size, logit_softcap=softcap, dtype=dtype, **extra)
    results = []
    for op in (partial(cross_entropy, chunk=chunk), cross_entropy_reference):
        sums = lambda *a, op=op: op(*a, targets, **options)  # noqa: E731
        loss = lambda *a, sums=sums: (3 * sums(*a)[0].reshape(-1)[0], sums(*a))  # noqa: E731
        results.append(jax.jit(jax.grad(loss, (0, 1), has_aux=True))(hidden, embedding))
    assert_close(*results, dtype)


def test_logits_stored_in_bfloat16_cost_what_their_rounding_does():
    hidden, embedding = normal(0, 2, 64, 32), normal(1, 500, 32)
    targets = jax.random.randint(jax.random.key(2), (2, 64), 0, 500)
    loss = partial(cross_entropy, vocab_size=500, dtype="bfloat16")
    options = [dict(logits_dtype=dtype) for dtype in ("float32", "bfloat16")]
    exact, rounded = (loss(hidden, embedding, targets, **o)[0] / 128 for o in options)
    assert 0 < abs(exact - rounded) < 2**-9 * exact  # half of bfloat16's last place
    confident = (3 * embedding[:64])[None]
    assert (
        loss(confident, 3 * embedding, jnp.arange(64)[None], logits_dtype="bfloat16")[0]
        >= 0
    )
    gradients = [
        jax.grad(lambda h, o=o: loss(h, embedding, targets, **o)[0])(hidden)
        for o in options
    ]
    assert_close(gradients[1], gradients[0], "bfloat16")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_variants_of_every_platform_equal_the_references(
    monkeypatch, platform, dtype
):
    x, kernel, bias = normal(0, 2, 8, 5), normal(1, 5, 3, 2, 7), normal(2, 3, 2, 7)

    def program():
        loss = partial(cross_entropy, vocab_size=3, dtype=dtype)
        step = lambda x, kernel: (  # noqa: E731
            linear_parts(x, kernel, bias, dtype=dtype),
            loss(x, kernel[:, :, 0, 0].T, jnp.zeros((2, 8), int)),
        )
        return str(jax.make_jaxpr(step)(x, kernel))

    on_cpu = program()
    monkeypatch.setattr("jax.default_backend", lambda: platform)
    assert (program() != on_cpu) == (platform != "cpu")
    for has_bias, activation in ((True, gelu_tanh), (False, None)):
        test_linear_equals_tensordot_and_its_derivative(
            8, 7, dtype, has_bias, activation
        )
    test_linear_contracts_two_axes()
    test_linear_kernel_gradient_is_not_rounded_through_bfloat16()
    whole = lambda *a: jnp.moveaxis(linear_reference(*a, dtype=dtype), 2, 0)  # noqa: E731
    parts = lambda *a: jnp.stack(linear_parts(*a, dtype=dtype))  # noqa: E731
    assert_equal(parts, whole, (x, kernel, bias), dtype)
    means = [("layernorm", 10.0), ("rmsnorm", 10.0), ("layernorm", 300.0)]
    for kind, mean in means if dtype == "float32" else means[:2]:
        test_norm_equals_reference(
            8, 40, mean, kind, (dtype, dtype), mean * (platform == "gpu")
        )
    huge = (
        jnp.full((1, 1, 40), 3e19, dtype).at[..., -1].set(0.0)
    )  # whose squares overflow
    assert jnp.isfinite(norm(huge, jnp.ones(40), jnp.zeros(40))).all()
    for softcap, extra in ((0.0, {}), (2.0, dict(z_loss=0.1, label_smoothing=0.1))):
        test_cross_entropy_equals_reference(7, 3, 2, dtype, softcap, extra)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_loss_of_rounded_products_is_that_of_their_logits(monkeypatch, platform):
    """A device that rounds operands of float32 products, as TF32 or bfloat16, is played here."""
    exact = cross_entropy_module.dot
    rounded = lambda a, b, *how: exact(  # noqa: E731
        *(x.astype(jnp.bfloat16).astype(x.dtype) for x in (a, b)), *how
    )
    embedding = 3 * normal(1, 500, 32)
    args = embedding[:64][None], embedding, jnp.arange(64)[None]
    logits = rounded(args[0], embedding, (2,), (1,))
    expected = (
        jax.nn.logsumexp(logits, -1).sum() - logits[0, args[2][0], args[2][0]].sum()
    )
    monkeypatch.setattr(cross_entropy_module, "dot", rounded)
    wrong, _ = cross_entropy(*args, vocab_size=500)
    assert abs(wrong - expected) > 0.1
    with tracing(platform=platform):
        loss, _ = cross_entropy(*args, vocab_size=500)
    np.testing.assert_allclose(loss, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gelu_equals_reference_and_its_derivative_from_end_to_end(dtype):
    x = jnp.concatenate(
        [jnp.linspace(-12, 12, 999), jnp.array([-6e4, -30.0, 30.0, 6e4])]
    )
    x = x.astype(dtype)
    for near_or_far in (
        x[:-4],
        x[-4:],
    ):  # apart: agreement is relative to the largest value
        assert_close(gelu_tanh(near_or_far), gelu_tanh_reference(near_or_far), dtype)

    @partial(jax.jit, static_argnums=0)
    def slopes(f, x):
        return jax.vmap(jax.grad(lambda x: f(x).astype(jnp.float32)))(x)

    assert_close(slopes(gelu_tanh, x), slopes(gelu_tanh_reference, x), dtype)
    far = (
        [-6e4, 6e4] if dtype == "float16" else [-1e18, -1e13, 1.3e13, 1e18]
    )  # the cube overflows
    assert slopes(gelu_tanh, jnp.array(far, dtype)).tolist() == [x > 0 for x in far]


@pytest.mark.parametrize(("name", "power"), [("relu", 1), ("relu_squared", 2)])
def test_activations_with_their_own_rule_have_the_derivative_of_their_formula(
    name, power
):
    x = jnp.array([-2.0, -0.5, 0.0, 0.25, 3.0])
    slopes = jax.vmap(jax.grad(ACTIVATIONS[name]))(x)
    np.testing.assert_allclose(slopes, power * (x > 0) * jnp.abs(x) ** (power - 1))
