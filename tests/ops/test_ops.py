"""Every kernel equals its formula, values and gradients, in the variant of every platform."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gpt2.config import GPTConfig, ParallelConfig
from gpt2.errors import UserError
from gpt2.lab.plan.collectives import collectives
from gpt2.model.ingredients import score_term_options
from gpt2.ops import Scoring, plain
from gpt2.ops.head_loss import _choose_chunk, head_loss, one_pass_log_sum_exp
from gpt2.ops.linear import (
    add_rows,
    gelu_tanh,
    linear,
    linear_separately,
)
from gpt2.ops.norm import norm
from gpt2.ops.plain import SoftCap
from gpt2.ops.variants import VARIANTS, variants_for
from gpt2.parallel.kernels import choose_attention, get_attention
from gpt2.parallel.mesh import make_mesh
from gpt2.parallel.rules import BATCH_AXES, Rules, map_devices
from tests.helpers import thorough

RULES = Rules.from_config(ParallelConfig())
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
CPU = VARIANTS["cpu"]


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def qkv(*shape):
    return [normal(seed, *shape) for seed in range(3)]


def assert_close(actual, expected, dtype="float32"):
    """Agreement relative to the largest entry: narrow types round each entry, not each sum."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype
        a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
        np.testing.assert_allclose(
            a, e, rtol=0, atol=TOLERANCE[dtype] * np.abs(e).max(initial=1)
        )


def weighted(op, *shape):
    """Turns an operation into a scalar function whose gradient reaches every output entry."""
    return lambda *args: (op(*args) * normal(9, *shape)).sum().astype(jnp.float32)


def assert_equal(fast, formula, args, dtype):
    """Agreement of two operations: of their values, types, and gradients of all arguments."""

    def both(op):
        def scalar(*args):
            value = op(*args)
            return weighted(lambda: value, *value.shape)(), value

        every = tuple(range(len(args)))
        gradients, value = jax.jit(jax.grad(scalar, every, has_aux=True))(*args)
        return value, gradients

    assert_close(both(fast), both(formula), dtype)


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "bias", "name"),
    [
        *((9, 7, "float32", bias, "gelu_tanh") for bias in (False, True)),
        (1, 1, "bfloat16", True, "silu"),
        (8, 2, "float16", False, ""),
    ],
)
def test_linear_equals_its_formula(rows, width, dtype, bias, name, variants=CPU):
    x = normal(0, 2, rows, 5)
    kernel = normal(1, 5, 3, 2, width)
    args = (x, kernel) + ((normal(2, 3, 2, width),) if bias else ())
    fast = partial(linear, dtype=dtype, variants=variants)
    formula = partial(plain.linear, dtype=dtype)
    if name:
        fast = partial(fast, activation=plain.ACTIVATIONS[name])
        formula = partial(formula, activation=plain.ACTIVATIONS[name])
    assert fast(*args).dtype == dtype
    assert_equal(fast, formula, args, dtype)


def test_linear_keeps_the_input_of_its_activation_and_not_the_value():
    x = normal(0, 64, 32)
    kernel = normal(1, 32, 16)
    fast = partial(linear, activation=gelu_tanh, dtype="float32", variants=CPU)
    _, backward = jax.vjp(lambda x: fast(x, kernel), x)
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
def test_norm_equals_its_formula(
    rows, width, mean, kind, dtypes, shift=0.0, variants=CPU
):
    x = (normal(0, 2, rows, width) + mean).astype(dtypes[0])
    args = (x, 1 + normal(1, width)) + (
        (normal(2, width),) if kind == "layernorm" else ()
    )
    options = dict(center=kind != "rmsnorm", dtype=dtypes[1])
    fast = partial(norm, variants=variants, **options)
    assert fast(*args).dtype == dtypes[1]

    def formula(x, *rest):
        return plain.norm(x - options["center"] * shift, *rest, **options)

    assert_equal(fast, formula, args, max(dtypes, key=TOLERANCE.get))


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_gradients_of_a_norm_of_split_rows_cross_devices_as_sums(platform):
    mesh = make_mesh(ParallelConfig(data=2, tensor=4))
    rows = NamedSharding(mesh, PartitionSpec("tensor"))
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((8, 16, 32), "float32", sharding=rows)
    vector = jax.ShapeDtypeStruct((32,), "float32", sharding=whole)

    def sent(**how):
        variants = variants_for(platform, **how)
        fast = partial(norm, dtype="float32", variants=variants)
        gradients = jax.jit(
            jax.grad(weighted(fast, *x.shape), (0, 1, 2)),
            out_shardings=(rows, whole, whole),
        )
        found = collectives(gradients.lower(x, vector, vector).compile().as_text())
        return {each.kind for each in found}

    assert sent(several=True, splits_axes=True) == {"all-reduce"}
    assert sent(several=True, splits_axes=False) == {"all-reduce"}
    if platform == "gpu":  # what XLA makes of the variant for rows that are whole
        assert "collective-permute" in sent(several=False, splits_axes=False)


def test_linear_contracts_two_axes(variants=CPU):
    x = normal(0, 2, 5, 3, 4)
    kernel = normal(1, 3, 4, 6)
    expected = np.asarray(x).reshape(2, 5, 12) @ np.asarray(kernel).reshape(12, 6)
    how = dict(num_contract=2, dtype="float32")
    for found in (
        linear(x, kernel, variants=variants, **how),
        plain.linear(x, kernel, **how),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_linear_kernel_gradient_is_not_rounded_through_bfloat16(variants=CPU):
    x = jnp.ones((257, 1))
    kernel = jnp.zeros((1, 1))
    fast = partial(linear, dtype=jnp.bfloat16, variants=variants)
    gradient = jax.grad(lambda w: fast(x, w).astype(jnp.float32).sum())
    assert gradient(kernel) == 257  # bfloat16 holds 256 and 258, not 257


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_table_are_added_as_the_formula_says(dtype):
    args = normal(0, 3, 5, 8).astype(dtype), normal(1, 7, 8)
    assert_equal(add_rows, plain.add_rows, args, dtype)


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
def test_blocked_attention_equals_its_formula(batch_size, length, heads, dtype, mask):
    q, k, v = (x.astype(dtype) for x in qkv(batch_size, length, heads, 8))
    segments = jax.random.randint(jax.random.key(3), (batch_size, length), 0, 4)
    check_attention("blocked", q, k, v, segments if mask else None, dtype)


def check_attention(name, q, k, v, segments, dtype, **options):
    """Holds an implementation to the formula; `options` are those of `Scoring`."""
    options.setdefault("scale", q.shape[-1] ** -0.5)

    def run(attention, q, k, v):
        return attention(q, k, v, Scoring(segments=segments, **options))

    fast = get_attention(name, "cpu")
    assert_equal(partial(run, fast), partial(run, plain.attention), (q, k, v), dtype)


def add_column(scores, query, key):
    """A term that gives a column more, as a sink does."""
    return jnp.concatenate([scores, jnp.ones((*scores.shape[:-1], 1))], axis=-1)


def nearer_first(scores, query, key):
    """A term that no kernel knows: keys an odd distance away weigh less."""
    assert query.shape == (scores.shape[2], 1) and key.ndim == 1
    return scores - 0.5 * ((query - key) % 2)


@pytest.mark.parametrize(
    ("implementation", "length", "options"),
    [
        # Blocks of 256: windows that end in the block, in the one before, and at its first key.
        ("blocked", 600, dict(window=7, terms=(SoftCap(0.4),), scale=0.7)),
        ("blocked", 600, dict(window=256)),
        ("blocked", 600, dict(window=301, terms=(SoftCap(2.0),))),
        ("splash", 128, dict(window=7, terms=(SoftCap(0.4),), scale=0.7)),
        # By the formula: terms that an implementation lacks, alone or beside one that it has.
        *(
            (name, 128, dict(terms=terms))
            for name in ("blocked", "cudnn", "splash")
            for terms in (
                (nearer_first,),
                (nearer_first, SoftCap(0.4)),
                (SoftCap(0.4), add_column),
            )
        ),
        ("cudnn", 40, dict(terms=(SoftCap(0.4),))),
        ("splash", 40, dict(terms=(SoftCap(0.4),))),
    ],
)
def test_attention_of_every_scoring_and_grouped_heads_equals_its_formula(
    implementation, length, options
):
    q = normal(0, 2, length, 4, 8)
    k = normal(1, 2, length, 2, 8)
    v = normal(2, 2, length, 2, 8)
    segments = jnp.sort(jax.random.randint(jax.random.key(3), (2, length), 0, 3))
    check_attention(implementation, q, k, v, segments, "float32", **options)


def test_odd_lengths_are_the_formulas_where_cudnn_would_refuse_them():
    q, k, v = (normal(i, 2, 7, 4, 8).astype("bfloat16") for i in range(3))
    check_attention("cudnn", q, k, v, None, "bfloat16")
    with pytest.raises(Exception, match=r"(?i)cudnn|gpu|cuda"):
        check_attention("cudnn", q[:, 1:], k[:, 1:], v[:, 1:], None, "bfloat16")


@pytest.mark.parametrize("name", ["blocked", "cudnn", "splash"])
def test_a_cap_that_is_learned_has_the_formulas_gradient(name):
    q, k, v = qkv(2, 128, 4, 8)

    def run(attention, q, k, v, cap):
        how = Scoring(8**-0.5, terms=(SoftCap(cap),))
        return attention(q, k, v, how)

    args = q, k, v, jnp.float32(0.7)
    fast = partial(run, get_attention(name, "cpu"))
    assert_equal(fast, partial(run, plain.attention), args, "float32")


def test_terms_of_scores_act_in_their_order():
    q, k, v = qkv(1, 9, 4, 8)
    found = [
        plain.attention(q, k, v, Scoring(1.0, terms=terms))
        for terms in ((SoftCap(0.4), nearer_first), (nearer_first, SoftCap(0.4)), ())
    ]
    for index, one in enumerate(found):
        for other in found[:index]:
            assert jnp.abs(one - other).max() > 1e-2


@pytest.mark.parametrize("name", ["blocked", "cudnn", "splash"])
def test_dropout_of_weights_is_the_formulas_in_every_implementation(name):
    q, k, v = qkv(2, 128, 4, 8)
    how = Scoring(8**-0.5, dropout=0.5, dropout_key=jax.random.key(0))
    expected = plain.attention(q, k, v, how)
    np.testing.assert_array_equal(get_attention(name, "cpu")(q, k, v, how), expected)
    whole = plain.attention(q, k, v, how._replace(dropout=0.0, dropout_key=None))
    assert jnp.abs(expected - whole).max() > 0.1


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_positions_attend_to_a_cache_as_to_all_at_once(dtype, kv_heads, new):
    q = normal(0, 2, 9, 4, 8).astype(dtype)
    k, v = (normal(i, 2, 9, kv_heads, 8).astype(dtype) for i in (1, 2))
    garbage = jnp.full((2, 3, kv_heads, 8), 1e9, dtype)
    caches = [jnp.concatenate([x, garbage], axis=1).swapaxes(1, 2) for x in (k, v)]
    terms = SoftCap(2.0), nearer_first, add_column
    scoring = Scoring(8**-0.5, window=4, terms=terms)
    cached = jax.jit(partial(plain.attention_cached, scoring=scoring))
    whole = plain.attention(q, k, v, scoring)
    assert_close(
        cached(q[:, -new:], *caches, jnp.array([9, 9])), whole[:, -new:], dtype
    )


CAPPED = {"attention_softcap": 0.4}
SUNK = {"attention_sink": True}
# Platforms of kinds of devices, and compute capabilities, which GPUs alone have.
DEVICES = {
    "CPU": ("cpu", "9"),
    "NVIDIA L4": ("cuda", "8.9"),
    "Tesla T4": ("gpu", "7.5"),
    "AMD": ("gpu", "gfx942"),
    "TPU v5 lite": ("tpu", "9"),
    "TPU v3": ("tpu", "9"),
}


@pytest.mark.parametrize(
    ("kind", "dtype", "length", "switch", "expected"),
    [
        ("CPU", "float32", 1024, {}, "blocked"),
        ("CPU", "float32", 128, {}, "plain"),
        ("CPU", "bfloat16", 128, {}, "blocked"),
        ("CPU", "bfloat16", 64, {}, "plain"),
        ("CPU", "bfloat16", 1024, CAPPED, "blocked"),
        ("NVIDIA L4", "bfloat16", 1024, {}, "cudnn"),
        ("NVIDIA L4", "float32", 1024, {}, "plain"),
        ("NVIDIA L4", "bfloat16", 1023, {}, "plain"),
        ("AMD", "bfloat16", 1024, {}, "plain"),
        ("NVIDIA L4", "bfloat16", 1024, CAPPED, "plain"),
        ("Tesla T4", "float16", 1024, {}, "plain"),
        ("TPU v5 lite", "bfloat16", 1024, {}, "splash"),
        ("TPU v5 lite", "bfloat16", 1000, {}, "plain"),
        ("TPU v5 lite", "bfloat16", 1024, CAPPED, "splash"),
        ("TPU v5 lite", "bfloat16", 1024, SUNK, "plain"),
        ("TPU v3", "bfloat16", 1024, {}, "plain"),
    ],
)
def test_auto_attention_is_what_can_run(kind, dtype, length, switch, expected):
    def choose(name):
        size = dict(num_heads=2, embed_dim=128, context_length=length)
        cfg = GPTConfig(attention=name, compute_dtype=dtype, **size, **switch)
        platform, capability = DEVICES[kind]
        device = SimpleNamespace(
            device_kind=kind, platform=platform, compute_capability=capability
        )
        return choose_attention(cfg, device, score_term_options(cfg))[0]

    assert choose("auto") == expected
    assert choose("plain") == "plain"
    for name in {"cudnn", "splash"} - {expected}:
        with pytest.raises(UserError, match=name):
            choose(name)


@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize("implementation", ["blocked", "splash"])
def test_attention_on_a_mesh_equals_its_formula(implementation, with_segments):
    """As the pjit backend computes: each device's rows by themselves, heads split by `tensor`."""
    mesh = make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))
    given = qkv(4, 1, 128, 2, 8)
    segments = jnp.sort(jax.random.randint(jax.random.key(3), (4, 1, 128), 0, 4))

    def gradient(attention, scale, given, segments):
        def scalar(scale):
            how = Scoring(
                8**-0.5,
                terms=(SoftCap(0.4),),
                segments=segments if with_segments else None,
            )
            return jnp.sin(attention(*(scale * x for x in given), how)).sum()

        return jax.value_and_grad(scalar)(scale)

    scale = jnp.ones((2, 8))
    expected = jax.vmap(partial(gradient, plain.attention), in_axes=(None, 0, 0))(
        scale, given, segments
    )
    spread = partial(map_devices, mesh=mesh, rules=RULES)
    fast = get_attention(implementation, "cpu", spread)

    def on_device(*args):
        one = jax.tree.map(lambda x: x[0], args[1:])
        return jax.tree.map(lambda x: x[None], gradient(fast, args[0], *one))

    rows = PartitionSpec(BATCH_AXES)
    specs = dict(mesh=mesh, in_specs=(PartitionSpec(), rows, rows), out_specs=rows)
    mapped = jax.shard_map(
        on_device, **specs, axis_names=set(BATCH_AXES), check_vma=False
    )
    assert_close(jax.jit(mapped)(scale, given, segments), expected)


def loss_of(vocab_size, log_sum_exp, softcap=0.0, z_loss=0.0, weights=(1.0,)):
    """A loss with all that a loss may have: terms, several targets, padding, what is logged."""

    def loss(logits, rows):
        if softcap:
            logits = SoftCap(softcap)(logits)
        logits = plain.hide_padding(logits, vocab_size)
        normaliser = log_sum_exp(logits)
        terms = z_loss * normaliser**2 - 0.1 * logits[..., :vocab_size].mean(axis=-1)
        found = {
            name: plain.sum_real(
                normaliser - plain.pick(logits, targets) + terms, targets
            )
            for name, targets in rows.items()
        }
        sums = [total for total, _ in found.values()]
        return jnp.stack(sums) @ jnp.array(weights), found

    return loss


@pytest.mark.parametrize(
    ("length", "chunk", "padding", "dtype", "extra"),
    [
        (9, 4, 0, "float32", dict(z_loss=0.3)),
        (7, 8, 5, "float32", dict(softcap=3.0, z_loss=0.1)),
        (1, 2, 2, "bfloat16", dict(softcap=3.0)),
        (9, 4, 2, "float32", dict(softcap=3.0, z_loss=0.1, weights=(1.0, 0.5, 0.25))),
        (9, 4, 2, "float32", dict(weights=(1.0, 0.5))),
    ],
)
def test_head_loss_equals_its_formula(
    length, chunk, padding, dtype, extra, variants=CPU
):
    vocab_size = 11
    hidden = normal(0, 2, length, 8)
    table = normal(1, vocab_size + padding, 8)
    shape = len(extra.get("weights", (1.0,))), 2, length
    targets = jax.random.randint(jax.random.key(2), shape, -1, vocab_size)
    rows = {str(k): each for k, each in enumerate(targets)}
    fast = partial(head_loss, variants=variants, num_rows=2 * chunk)
    in_kernels = (
        one_pass_log_sum_exp if variants.one_pass_statistics else plain.log_sum_exp
    )
    results = []
    for op, log_sum_exp in (
        (fast, in_kernels),
        (plain.head_loss, plain.log_sum_exp),
    ):
        of_logits = loss_of(vocab_size, log_sum_exp, **extra)

        def loss(hidden, table, op=op, of_logits=of_logits):
            objective, logged = op(of_logits, hidden, table, rows, dtype=dtype)
            return 3 * objective + logged["0"][0], logged  # which has no derivative

        results.append(jax.jit(jax.grad(loss, (0, 1), has_aux=True))(hidden, table))
    assert_close(*results, dtype)


def test_chunks_of_positions_divide_them():
    lengths = {(1024, 300): 256, (1000, 128): 125, (130, 64): 26, (131, 64): 131}
    assert {each: _choose_chunk(*each) for each in lengths} == lengths


def test_small_derivatives_of_the_head_survive_float16():
    hidden = 1 + normal(0, 1, 64, 16) / 16
    table = (normal(1, 64, 16) / 64).at[0].set(14 / 16)
    rows = {"targets": jnp.zeros((1, 64), jnp.int32)}  # others have e^-14, below 2^-14

    def gradient(op, dtype):
        def loss(table):
            lost, _ = op(plain.cross_entropy, hidden, table, rows, dtype=dtype)
            return lost / 64

        return jax.jit(jax.grad(loss))(table)[1:]

    fast = partial(head_loss, variants=CPU, num_rows=64)
    found = gradient(fast, "float16")
    expected = gradient(plain.head_loss, "float32")
    error = jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)
    assert error < 2**-9  # of float16, 2^-11 for each of a few roundings


@pytest.mark.parametrize("jit", [jax.jit, lambda function: function])
def test_a_loss_with_numbers_to_learn_equals_its_formula(jit):
    hidden = normal(0, 2, 9, 8)
    table = normal(1, 13, 8)
    rows = {"targets": jax.random.randint(jax.random.key(2), (2, 9), -1, 11)}

    def gradients(op, hidden, table, temperatures, step):
        def loss(hidden, table, temperatures):
            def of_logits(logits, rows):
                losses = loss_of(11, plain.log_sum_exp)(logits * temperatures, rows)
                return jax.tree.map(lambda x: x * step, losses)

            return op(of_logits, hidden, table, rows, dtype="float32")

        return jax.grad(loss, (0, 1, 2), has_aux=True)(hidden, table, temperatures)

    args = hidden, table, jnp.linspace(0.5, 2.0, 13), jnp.int32(2)
    fast = partial(head_loss, variants=CPU, num_rows=8)  # in three chunks
    found, expected = (
        jit(partial(gradients, op))(*args) for op in (fast, plain.head_loss)
    )
    assert_close(found, expected)
    assert jnp.abs(expected[0][2][:11]).min() > 1e-3


def test_logits_stored_in_bfloat16_cost_what_their_rounding_does():
    hidden = normal(0, 2, 64, 32)
    embedding = normal(1, 500, 32)
    rows = {"targets": jax.random.randint(jax.random.key(2), (2, 64), 0, 500)}

    @partial(jax.jit, static_argnums=3)
    @jax.value_and_grad
    def step(hidden, table, rows, logits_dtype):
        lost, _ = head_loss(
            plain.cross_entropy,
            hidden,
            table,
            rows,
            dtype="bfloat16",
            logits_dtype=logits_dtype,
            variants=CPU,
            num_rows=512,
        )
        return lost

    exact, wanted = step(hidden, embedding, rows, "float32")
    rounded, found = step(hidden, embedding, rows, "bfloat16")
    assert 0 < abs(exact - rounded) < 2**-9 * exact  # half of bfloat16's last place
    assert_close(found, wanted, "bfloat16")
    confident = (3 * embedding[:64])[None]
    own = {"targets": jnp.arange(64)[None]}
    assert step(confident, 3 * embedding, own, "bfloat16")[0] >= 0


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_variants_of_every_platform_equal_the_formulas(platform, dtype):
    x = normal(0, 2, 8, 5)
    kernel = normal(1, 5, 3, 2, 7)
    bias = normal(2, 3, 2, 7)
    variants = VARIANTS[platform]

    def make_parts(*args, variants, **how):
        if variants.separate_qkv:
            return linear_separately(*args, variants=variants, **how)
        return plain.linear_parts(
            *args, linear=partial(linear, variants=variants), **how
        )

    def program(variants):
        rows = {"targets": jnp.zeros((2, 8), int)}

        def step(x, kernel):
            parts = make_parts(x, kernel, bias, dtype=dtype, variants=variants)
            table = kernel[:, :, 0, 0].T
            lost, _ = head_loss(
                plain.cross_entropy,
                x,
                table,
                rows,
                dtype=dtype,
                variants=variants,
                num_rows=16,
            )
            return parts, lost

        return str(jax.make_jaxpr(step)(x, kernel))

    assert (program(variants) != program(CPU)) == (platform != "cpu")
    for has_bias, name in ((True, "gelu_tanh"), (False, "")):
        test_linear_equals_its_formula(8, 7, dtype, has_bias, name, variants)
    test_linear_contracts_two_axes(variants)
    test_linear_kernel_gradient_is_not_rounded_through_bfloat16(variants)

    def stacked(op, *args, **how):
        return jnp.stack(op(*args, dtype=dtype, **how))

    fast = partial(stacked, make_parts, variants=variants)
    assert_equal(fast, partial(stacked, plain.linear_parts), (x, kernel, bias), dtype)
    means = [("layernorm", 10.0), ("rmsnorm", 10.0), ("layernorm", 300.0)]
    for kind, mean in means if dtype == "float32" else means[:2]:
        shift = mean * (platform == "gpu")
        test_norm_equals_its_formula(8, 40, mean, kind, (dtype, dtype), shift, variants)
    huge = jnp.full((1, 1, 40), 3e19, dtype)  # whose squares overflow
    huge = huge.at[..., -1].set(0.0)
    normed = norm(huge, jnp.ones(40), jnp.zeros(40), dtype="float32", variants=variants)
    assert jnp.isfinite(normed).all()
    for extra in (
        {},
        dict(softcap=2.0, z_loss=0.1),
        dict(z_loss=0.1, weights=(1.0, 0.5)),
    ):
        test_head_loss_equals_its_formula(7, 2, 2, dtype, extra, variants)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gelu_equals_its_formula_and_its_derivative_from_end_to_end(dtype):
    x = jnp.concatenate(
        [jnp.linspace(-12, 12, 999), jnp.array([-6e4, -30.0, 30.0, 6e4])]
    )
    x = x.astype(dtype)
    for near_or_far in (
        x[:-4],
        x[-4:],
    ):  # apart: agreement is relative to the largest value
        assert_close(gelu_tanh(near_or_far), plain.gelu_tanh(near_or_far), dtype)

    @partial(jax.jit, static_argnums=0)
    def slopes(f, x):
        return jax.vmap(jax.grad(lambda x: f(x).astype(jnp.float32)))(x)

    assert_close(slopes(gelu_tanh, x), slopes(plain.gelu_tanh, x), dtype)
    far = (
        [-6e4, 6e4] if dtype == "float16" else [-1e18, -1e13, 1.3e13, 1e18]
    )  # the cube overflows
    assert slopes(gelu_tanh, jnp.array(far, dtype)).tolist() == [x > 0 for x in far]


@pytest.mark.parametrize(("name", "power"), [("relu", 1), ("relu_squared", 2)])
def test_activations_with_their_own_rule_have_the_derivative_of_their_formula(
    name, power
):
    x = jnp.array([-2.0, -0.5, 0.0, 0.25, 3.0])
    slopes = jax.vmap(jax.grad(plain.ACTIVATIONS[name]))(x)
    np.testing.assert_allclose(slopes, power * (x > 0) * jnp.abs(x) ** (power - 1))
