"""Every kernel equals its formula, values and gradients, in the variant of every platform."""

import sys
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
from gpt2.ops.linear_bias import _factors, with_linear_bias
from gpt2.ops.norm import norm
from gpt2.ops.plain import LinearBias, SoftCap
from gpt2.ops.variants import VARIANTS, variants_for
from gpt2.parallel import kernels
from gpt2.parallel.kernels import choose_attention, get_attention
from gpt2.parallel.mesh import make_mesh
from gpt2.parallel.rules import BATCH_AXES, Rules, map_devices
from tests.helpers import thorough

RULES = Rules.from_config(ParallelConfig())
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
CPU = VARIANTS["cpu"]

each_platform = pytest.mark.parametrize("platform", VARIANTS)
# Kernels of other platforms, by which CPUs can compute too.
each_variant = pytest.mark.parametrize(
    "platform", ["cpu", thorough("gpu"), thorough("tpu")]
)
each_kernel = pytest.mark.parametrize("name", ["blocked", "cudnn", "splash", "tokamax"])
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def normal(seed, *shape):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def qkv(*shape):
    return [normal(seed, *shape) for seed in range(3)]


def random_integers(least, bound, *shape):
    return jnp.asarray(np.random.default_rng(3).integers(least, bound, shape))


def assert_close(actual, expected, dtype="float32"):
    """Compare trees relative to the largest entry: narrow types round each entry, not each sum."""
    actual = jax.tree.leaves(actual)
    expected = jax.tree.leaves(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert a.dtype == e.dtype
        a = np.asarray(a, np.float32)
        e = np.asarray(e, np.float32)
        largest = np.abs(e).max(initial=1)
        atol = TOLERANCE[dtype] * largest
        np.testing.assert_allclose(a, e, rtol=0, atol=atol)


def weighted_sum(value):
    """Return a scalar whose gradient reaches every entry of an array."""
    weights = normal(9, *value.shape)
    return (value * weights).sum().astype(jnp.float32)


def with_gradients(op, args):
    """Return the value of an operation, and the gradients of all its arguments."""

    def scalar(*args):
        value = op(*args)
        return weighted_sum(value), value

    argnums = tuple(range(len(args)))
    gradients = jax.jit(jax.grad(scalar, argnums, has_aux=True))
    return gradients(*args)


def assert_equal(fast, formula, args, dtype):
    """Compare the values, dtypes and gradients of two operations."""
    actual = with_gradients(fast, args)
    expected = with_gradients(formula, args)
    assert_close(actual, expected, dtype)


def check_linear(variants, dtype, rows, width, has_bias, activation=None):
    args = [normal(0, 2, rows, 5), normal(1, 5, 3, 2, width)]
    if has_bias:
        args.append(normal(2, 3, 2, width))
    options = {"activation": activation, "dtype": dtype}
    fast = partial(linear, variants=variants, **options)
    formula = partial(plain.linear, **options)
    assert fast(*args).dtype == dtype
    assert_equal(fast, formula, args, dtype)


@each_variant
def test_linear_equals_its_formula(platform):
    variants = VARIANTS[platform]
    check_linear(variants, "float32", 9, 7, True, plain.gelu_tanh)
    check_linear(variants, "bfloat16", 1, 1, True, plain.ACTIVATIONS["silu"])
    check_linear(variants, "float16", 8, 2, False)


def test_linear_keeps_the_input_of_its_activation_and_not_the_value():
    x = normal(0, 64, 32)
    kernel = normal(1, 32, 16)
    fast = partial(linear, activation=gelu_tanh, dtype="float32", variants=CPU)
    _, backward = jax.vjp(lambda x: fast(x, kernel), x)
    residuals = jax.tree.leaves(backward)
    (residual,) = [leaf for leaf in residuals if leaf.shape == x.shape]
    np.testing.assert_array_equal(residual, x)


@each_platform
def test_linear_contracts_two_axes(platform):
    x = normal(0, 2, 5, 3, 4)
    kernel = normal(1, 3, 4, 6)
    expected = np.tensordot(x, kernel, 2)
    options = {"num_contract": 2, "dtype": "float32"}
    fast = linear(x, kernel, variants=VARIANTS[platform], **options)
    formula = plain.linear(x, kernel, **options)
    np.testing.assert_allclose(fast, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(formula, expected, rtol=1e-4, atol=1e-5)


@each_platform
def test_linear_kernel_gradient_is_not_rounded_through_bfloat16(platform):
    x = jnp.ones((257, 1))

    def total(kernel):
        y = linear(x, kernel, dtype=jnp.bfloat16, variants=VARIANTS[platform])
        return y.astype(jnp.float32).sum()

    gradient = jax.grad(total)(jnp.zeros((1, 1)))
    assert gradient == 257  # bfloat16 has 256 and 258, not 257


@each_dtype
def test_rows_of_a_table_are_added_as_the_formula_says(dtype):
    x = normal(0, 3, 5, 8).astype(dtype)
    table = normal(1, 7, 8)
    assert_equal(add_rows, plain.add_rows, (x, table), dtype)


def check_norm(variants, x, *, center=True, has_bias=True, dtype="float32", shift=0.0):
    """Compare with the formula, which sees the rows `x` less a shift that changes no LayerNorm."""
    width = x.shape[-1]
    args = [x, 1 + normal(1, width)]
    if has_bias:
        args.append(normal(2, width))
    fast = partial(norm, center=center, dtype=dtype, variants=variants)
    assert fast(*args).dtype == dtype

    def formula(x, *rest):
        return plain.norm(x - shift, *rest, center=center, dtype=dtype)

    widest = max(x.dtype.name, dtype, key=TOLERANCE.get)
    assert_equal(fast, formula, args, widest)


@each_variant
def test_norm_equals_its_formula(platform):
    check = partial(check_norm, VARIANTS[platform])
    x = normal(0, 2, 9, 40)
    one_pass = platform == "gpu"  # which shifts rows by their first entry
    check(x + 300.0, shift=300.0 * one_pass)
    near = (x + 10.0).astype("bfloat16")
    check(near, shift=10.0 * one_pass, dtype="bfloat16")
    check(normal(0, 2, 1, 2).astype("bfloat16"))
    check(normal(0, 2, 4, 31), center=False, has_bias=False, dtype="float16")


@each_platform
def test_gradients_of_a_norm_of_split_rows_cross_devices_as_sums(platform):
    mesh = make_mesh(ParallelConfig(data=2, tensor=4))
    rows = NamedSharding(mesh, PartitionSpec("tensor"))
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((8, 16, 32), "float32", sharding=rows)
    vector = jax.ShapeDtypeStruct((32,), "float32", sharding=whole)

    def sent(several, splits_axes):
        layout = {"several": several, "splits_axes": splits_axes}
        variants = variants_for(platform, **layout)

        def scalar(*args):
            return weighted_sum(norm(*args, dtype="float32", variants=variants))

        gradient = jax.grad(scalar, (0, 1, 2))
        gradients = jax.jit(gradient, out_shardings=(rows, whole, whole))
        text = gradients.lower(x, vector, vector).compile().as_text()
        return {transfer.kind for transfer in collectives(text)}

    assert sent(several=True, splits_axes=True) == {"all-reduce"}
    assert sent(several=True, splits_axes=False) == {"all-reduce"}
    if platform == "gpu":  # what XLA makes of the variant for rows that are whole
        assert "collective-permute" in sent(several=False, splits_axes=False)


def check_attention(name, q, k, v, segments, dtype="float32", **options):
    """Compare an implementation with the formula; `options` are those of `Scoring`."""
    options.setdefault("scale", q.shape[-1] ** -0.5)
    scoring = Scoring(segments=segments, **options)
    fast = partial(with_scoring, get_attention(name, "cpu"), scoring)
    formula = partial(with_scoring, plain.attention, scoring)
    assert_equal(fast, formula, (q, k, v), dtype)


def with_scoring(attention, scoring, q, k, v):
    return attention(q, k, v, scoring)


def check_blocked(batch_size, length, heads, dtype):
    """Compare blocked attention with the formula, without and with segments."""
    q, k, v = (x.astype(dtype) for x in qkv(batch_size, length, heads, 8))
    check_attention("blocked", q, k, v, None, dtype)
    segments = random_integers(0, 4, batch_size, length)
    check_attention("blocked", q, k, v, segments, dtype)


def test_blocked_attention_equals_its_formula():
    check_blocked(2, 7, 2, "bfloat16")  # two blocks of four
    check_blocked(2, 300, 1, "float32")  # two blocks with padding


@pytest.mark.thorough
def test_blocked_attention_of_other_lengths_equals_its_formula():
    check_blocked(3, 1, 1, "float32")
    check_blocked(3, 600, 2, "float32")  # groups across sequences
    check_blocked(2, 1030, 4, "float16")  # two groups
    check_blocked(1, 2100, 2, "bfloat16")  # eight blocks


def add_column(scores, query, key):
    """A term that adds a column, as a sink does."""
    column = jnp.ones((*scores.shape[:-1], 1))
    return jnp.concatenate([scores, column], axis=-1)


def nearer_first(scores, query, key):
    """A term that no kernel supports: keys at an odd distance weigh less."""
    assert query.shape == (scores.shape[2], 1)
    assert key.ndim == 1
    return scores - 0.5 * ((query - key) % 2)


CAP = SoftCap(0.4)


def check_scoring(name, length, **options):
    """Compare attention of grouped heads to segments with the formula."""
    q = normal(0, 2, length, 4, 8)
    k = normal(1, 2, length, 2, 8)
    v = normal(2, 2, length, 2, 8)
    segments = jnp.sort(random_integers(0, 3, 2, length))
    check_attention(name, q, k, v, segments, **options)


def test_attention_within_a_window_equals_its_formula():
    # Blocks of 256: windows that end in the block, in the one before, and at its first key.
    check_scoring("blocked", 600, window=7, terms=(CAP,), scale=0.7)
    check_scoring("blocked", 600, window=256)
    check_scoring("blocked", 600, window=301, terms=(SoftCap(2.0),))
    check_scoring("splash", 128, window=7, terms=(CAP,), scale=0.7)


@each_kernel
def test_a_term_that_a_kernel_lacks_is_computed_by_the_formula(name):
    check_scoring(name, 128, terms=(nearer_first,))
    check_scoring(name, 128, terms=(CAP, add_column))
    check_scoring(name, 128, terms=(CAP, BIAS))


# Slopes with more digits than 16 bits have, one of which is steep.
BIAS = LinearBias(jnp.array([0.7, 1 / 3, 2.0**-6.5, 0.0123]))


@each_dtype
def test_a_linear_bias_is_a_product_of_narrow_numbers(dtype):
    heads, positions = jax.jit(_factors, static_argnums=(1, 2))(
        BIAS.slopes, 1100, jnp.dtype(dtype)
    )
    product = np.float64(heads) @ np.float64(positions).T
    expected = np.outer(np.float64(BIAS.slopes), np.arange(1100))
    np.testing.assert_allclose(product, expected, rtol=2**-22)


@each_dtype
def test_a_linear_bias_needs_only_more_dimensions(dtype):
    inputs = [normal(seed, 2, 1100, heads, 8) for seed, heads in enumerate((4, 2, 2))]
    q, k, v = (x.astype(dtype) for x in inputs)
    segments = jnp.sort(random_integers(0, 3, 2, 1100))
    shapes = []

    def kernel(q, k, v, scoring):
        shapes.append((q.shape[-1], k.shape[-1], v.shape[-1], scoring.terms))
        return plain.attention(q, k, v, scoring)

    for options in ({}, {"segments": segments}, {"window": 700}):
        scoring = Scoring(8**-0.5, terms=(BIAS,), **options)
        fast = jax.jit(partial(with_scoring, with_linear_bias(kernel), scoring))
        actual = np.float32(fast(q, k, v))
        # In float32, so that only the rounding of the result is left.
        wide = (x.astype("float32") for x in (q, k, v))
        expected = np.float32(plain.attention(*wide, scoring))
        without = np.float32(plain.attention(q, k, v, scoring._replace(terms=())))
        tolerance = {"float32": 1e-4, "bfloat16": 2**-7}[dtype]
        assert np.abs(without - expected).max() > 0.5
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * 4)
    assert {*shapes} == {(16, 16, 16, ())}


def test_a_kernel_that_scales_queries_gets_exact_slopes():
    def kernel(q, k, v, scoring):
        given.append(q * jnp.asarray(scoring.scale, q.dtype))
        return v

    given = []
    q, k, v = (x.astype("bfloat16") for x in qkv(1, 4, 4, 8))
    biased = with_linear_bias(kernel, scales_queries=True)
    biased(q, k, v, Scoring(8**-0.5, terms=(BIAS,)))
    slopes = np.float64(given[0])[0, 0, :, 8:14:2].sum(-1)
    np.testing.assert_allclose(slopes, BIAS.slopes, rtol=2**-22)


@pytest.mark.parametrize("name", ["blocked", "splash"])
def test_kernels_compute_a_linear_bias(monkeypatch, name):
    args = qkv(2, 256, 4, 8)
    scoring = Scoring(8**-0.5, window=100, terms=(BIAS,))
    expected = with_gradients(partial(with_scoring, plain.attention, scoring), args)
    monkeypatch.setattr(plain, "attention", None)  # a kernel that falls back fails
    fast = partial(with_scoring, get_attention(name, "cpu"), scoring)
    assert_close(with_gradients(fast, args), expected)


@pytest.mark.parametrize("name", ["cudnn", "splash"])
def test_a_cap_or_length_that_a_kernel_lacks_is_computed_by_the_formula(name):
    check_scoring(name, 40, terms=(CAP,))


def test_odd_lengths_are_the_formulas_where_cudnn_would_refuse_them():
    q, k, v = (x.astype("bfloat16") for x in qkv(2, 7, 4, 8))
    check_attention("cudnn", q, k, v, None, "bfloat16")
    with pytest.raises(Exception, match=r"(?i)cudnn|gpu|cuda"):
        check_attention("cudnn", q[:, 1:], k[:, 1:], v[:, 1:], None, "bfloat16")


def masked_attention(
    q, k, v, *, mask, scale, is_causal, local_window_size, logits_soft_cap
):
    """Compute `tokamax.dot_product_attention` as its documentation defines it."""
    assert is_causal
    groups = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = scale * jnp.einsum("btkgh,bskh->bkgts", groups, k).astype("float32")
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
    visible = distance >= 0
    if local_window_size is not None:
        before, after = local_window_size
        visible = visible & (distance <= before) & (distance >= -after)
    if mask is not None:
        visible = visible & mask[:, :, None]
    weights = jax.nn.softmax(scores, where=visible).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)


@pytest.mark.parametrize("is_real", [False, True], ids=["stand-in", "tokamax"])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("cap", [(), (SoftCap(0.4),)], ids=["uncapped", "capped"])
def test_what_tokamax_is_called_with_is_the_formula(monkeypatch, is_real, window, cap):
    """By tokamax's reference implementation where the package is installed."""
    function = masked_attention
    if is_real:
        library = pytest.importorskip("tokamax")
        function = partial(library.dot_product_attention, implementation="xla")
    calls = []

    def attention(*arrays, implementation, **options):
        calls.append(implementation)
        return function(*arrays, **options)

    module = SimpleNamespace(dot_product_attention=attention)
    monkeypatch.setitem(sys.modules, "tokamax", module)
    q = normal(0, 2, 40, 4, 8).astype("bfloat16")
    k, v = (normal(seed, 2, 40, 2, 8).astype("bfloat16") for seed in (1, 2))
    segments = jnp.sort(random_integers(0, 3, 2, 40))
    for documents in (None, segments):
        options = {"window": window, "terms": cap, "scale": 0.7}
        check_attention("tokamax", q, k, v, documents, "bfloat16", **options)
    assert {*calls} == {"mosaic"}


def test_tokamax_does_not_compute_what_would_overflow_in_float16(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)  # any import of it fails
    q, k, v = (x.astype("float16") for x in qkv(2, 8, 4, 8))
    check_attention("tokamax", q, k, v, None, "float16", terms=(CAP,))
    q, k, v = (x.astype("bfloat16") for x in (q, k, v))
    with pytest.raises(ImportError):
        check_attention("tokamax", q, k, v, None, "bfloat16", terms=(CAP,))


@each_kernel
def test_a_cap_that_is_learned_has_the_formulas_gradient(name):
    cap = jnp.float32(0.7)
    args = (*qkv(2, 128, 4, 8), cap)

    def capped(attention, q, k, v, cap):
        scoring = Scoring(8**-0.5, terms=(SoftCap(cap),))
        return attention(q, k, v, scoring)

    fast = partial(capped, get_attention(name, "cpu"))
    formula = partial(capped, plain.attention)
    assert_equal(fast, formula, args, "float32")


def test_terms_of_scores_act_in_their_order():
    q, k, v = qkv(1, 9, 4, 8)

    def attend(*terms):
        return plain.attention(q, k, v, Scoring(1.0, terms=terms))

    cap_first = attend(CAP, nearer_first)
    cap_last = attend(nearer_first, CAP)
    assert jnp.abs(cap_first - cap_last).max() > 1e-2


@each_kernel
def test_dropout_of_weights_is_the_formulas_in_every_implementation(name):
    q, k, v = qkv(2, 128, 4, 8)
    attention = get_attention(name, "cpu")
    scoring = Scoring(8**-0.5, dropout=0.5, dropout_key=jax.random.key(0))
    actual = attention(q, k, v, scoring)
    expected = plain.attention(q, k, v, scoring)
    np.testing.assert_array_equal(actual, expected)
    kept = plain.attention(q, k, v, Scoring(8**-0.5))
    assert jnp.abs(expected - kept).max() > 0.1


@pytest.mark.parametrize(
    ("new", "kv_heads", "dtype"),
    [(1, 1, "float32"), (3, 2, "float32"), (1, 4, "bfloat16")],
)
def test_new_positions_attend_to_a_cache_as_to_all_at_once(new, kv_heads, dtype):
    q = normal(0, 2, 9, 4, 8).astype(dtype)
    k = normal(1, 2, 9, kv_heads, 8).astype(dtype)
    v = normal(2, 2, 9, kv_heads, 8).astype(dtype)
    terms = (SoftCap(2.0), nearer_first, add_column)
    scoring = Scoring(8**-0.5, window=4, terms=terms)
    expected = plain.attention(q, k, v, scoring)[:, -new:]
    garbage = jnp.full((2, 3, kv_heads, 8), 1e9, dtype)

    def cache(x):
        return jnp.concatenate([x, garbage], axis=1).swapaxes(1, 2)

    attend = jax.jit(partial(plain.attention_cached, scoring=scoring))
    length = jnp.array([9, 9])
    actual = attend(q[:, -new:], cache(k), cache(v), length=length)
    assert_close(actual, expected, dtype)


# Platforms of kinds of devices, and compute capabilities, which GPUs alone have.
DEVICES = {
    "CPU": ("cpu", "9"),
    "NVIDIA L4": ("cuda", "8.9"),
    "NVIDIA H100": ("cuda", "9.0"),
    "NVIDIA B200": ("cuda", "10.0"),
    "RTX 5090": ("cuda", "12.0"),
    "Tesla T4": ("gpu", "7.5"),
    "AMD": ("gpu", "gfx942"),
    "TPU v5 lite": ("tpu", "9"),
    "TPU v3": ("tpu", "9"),
}


def check_choice(
    expected,
    kind,
    dtype="bfloat16",
    length=1024,
    refused=("cudnn", "splash"),
    **switches,
):
    """Check what `auto` chooses, and that other kernels are refused."""
    platform, capability = DEVICES[kind]
    device = SimpleNamespace(
        device_kind=kind, platform=platform, compute_capability=capability
    )

    def choose(name):
        cfg = GPTConfig(
            attention=name,
            compute_dtype=dtype,
            num_heads=2,
            embed_dim=128,
            context_length=length,
            **switches,
        )
        choice, _ = choose_attention(cfg, device, score_term_options(cfg))
        return choice

    assert choose("auto") == expected
    assert choose("plain") == "plain"
    for name in {*refused} - {expected}:
        with pytest.raises(UserError, match=name):
            choose(name)


def test_auto_attention_of_cpus_is_blocked_unless_the_context_is_short():
    check_choice("blocked", "CPU", "float32")
    check_choice("plain", "CPU", "float32", 128)
    check_choice("blocked", "CPU", "bfloat16", 128)
    check_choice("plain", "CPU", "bfloat16", 64)
    check_choice("blocked", "CPU", attention_softcap=0.4)
    check_choice("blocked", "CPU", position="alibi")
    check_choice("plain", "CPU", position="alibi", attention_softcap=0.4)
    check_choice("plain", "CPU", refused=["blocked"], attention_sink=True)


def test_auto_attention_of_gpus_is_cudnn_where_it_can_run():
    check_choice("cudnn", "NVIDIA L4")
    check_choice("plain", "NVIDIA L4", "float32")
    check_choice("plain", "NVIDIA L4", length=1023)
    check_choice("plain", "NVIDIA L4", attention_softcap=0.4)
    check_choice("cudnn", "NVIDIA L4", position="alibi")
    check_choice("cudnn", "NVIDIA L4", length=2**16, position="alibi")
    check_choice("plain", "NVIDIA L4", length=2**17, position="alibi")
    check_choice("plain", "NVIDIA L4", position="alibi", head_dim=128)
    check_choice("plain", "AMD")
    check_choice("plain", "Tesla T4", "float16")


def choose_tokamax(kind, **options):
    platform, capability = DEVICES[kind]
    device = SimpleNamespace(
        device_kind=kind, platform=platform, compute_capability=capability
    )
    sizes = {"num_heads": 2, "embed_dim": 128, "compute_dtype": "bfloat16"}
    cfg = GPTConfig(**sizes | {"attention": "tokamax"} | options)
    return choose_attention(cfg, device, score_term_options(cfg))


def test_tokamax_is_chosen_by_its_name_alone(monkeypatch):
    monkeypatch.setattr(kernels, "is_installed", lambda: True)
    for kind in ("NVIDIA H100", "NVIDIA B200"):
        assert choose_tokamax(kind, attention_softcap=50.0) == ("tokamax", "")
        check_choice("plain", kind, attention_softcap=50.0)
        check_choice("cudnn", kind)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("NVIDIA L4", {}, r"does not run on this device \(NVIDIA L4\)"),
        ("RTX 5090", {}, "does not run on this device"),
        ("AMD", {}, "does not run on this device"),
        ("TPU v5 lite", {}, "does not run on this device"),
        ("NVIDIA H100", {"dropout": 0.1}, "does not support model.dropout"),
        ("NVIDIA H100", {"attention_sink": True}, "not support model.attention_sink"),
        ("NVIDIA H100", {"compute_dtype": "float16"}, "needs bfloat16, but .* float16"),
        ("NVIDIA H100", {"embed_dim": 512}, "the head size is 256"),
    ],
)
def test_tokamax_is_refused_where_it_cannot_run(monkeypatch, kind, options, message):
    monkeypatch.setattr(kernels, "is_installed", lambda: True)
    with pytest.raises(UserError, match=f"model.attention=tokamax .*{message}"):
        choose_tokamax(kind, **options)
    if not options:
        monkeypatch.setattr(kernels, "is_installed", lambda: False)
        with pytest.raises(UserError, match=r"pip install -e '\.\[tokamax\]'"):
            choose_tokamax("NVIDIA H100")


def test_auto_attention_of_tpus_is_splash_where_it_can_run():
    check_choice("splash", "TPU v5 lite")
    check_choice("splash", "TPU v5 lite", attention_softcap=0.4)
    check_choice("plain", "TPU v5 lite", length=1000)
    check_choice("plain", "TPU v5 lite", attention_sink=True)
    check_choice("plain", "TPU v3")


@pytest.mark.parametrize(
    ("name", "with_segments", "kv_heads"),
    [("blocked", True, 4), ("blocked", False, 2), ("splash", True, 2)],
)
def test_attention_on_a_mesh_equals_its_formula(name, with_segments, kv_heads):
    """As the pjit backend computes: each device's rows by themselves, heads split by `tensor`."""
    mesh = make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))
    segments = jnp.sort(random_integers(0, 4, 4, 1, 128))
    heads = (4, kv_heads, kv_heads)
    inputs = [normal(seed, 4, 1, 128, N, 8) for seed, N in enumerate(heads)]
    inputs.append(segments)

    def gradient(attention, scale, row):
        *qkv, segments = row
        if not with_segments:
            segments = None
        scoring = Scoring(8**-0.5, terms=(CAP,), segments=segments)

        def scalar(scale):
            q, k, v = (scale * x for x in qkv)
            return jnp.sin(attention(q, k, v, scoring)).sum()

        return jax.value_and_grad(scalar)(scale)

    scale = jnp.ones(8)
    formula = jax.vmap(partial(gradient, plain.attention), in_axes=(None, 0))
    expected = formula(scale, inputs)
    spread = partial(map_devices, mesh=mesh, rules=RULES)
    fast = get_attention(name, "cpu", spread)

    def on_device(scale, rows):
        row = jax.tree.map(lambda x: x[0], rows)
        result = gradient(fast, scale, row)
        return jax.tree.map(lambda x: x[None], result)

    rows = PartitionSpec(BATCH_AXES)
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows),
        out_specs=rows,
        axis_names=set(BATCH_AXES),
        check_vma=False,
    )
    actual = jax.jit(mapped)(scale, inputs)
    assert_close(actual, expected)


def loss_of(vocab_size, log_sum_exp, softcap=0.0, z_loss=0.0, weights=(1.0,)):
    """A loss with all that a loss may have: terms, several targets, padding, what is logged."""

    def loss(logits, rows):
        if softcap:
            logits = SoftCap(softcap)(logits)
        logits = plain.mask_padding(logits, vocab_size)
        normaliser = log_sum_exp(logits)
        mean_logit = logits[..., :vocab_size].mean(axis=-1)
        terms = z_loss * normaliser**2 - 0.1 * mean_logit
        logged = {}
        for name, targets in rows.items():
            losses = normaliser - plain.target_logits(logits, targets) + terms
            logged[name] = plain.masked_sum(losses, targets)
        totals = jnp.stack([total for total, _ in logged.values()])
        return totals @ jnp.array(weights), logged

    return loss


def check_head_loss(variants, dtype, length, chunk, padding, **options):
    vocab_size = 11
    hidden = normal(0, 2, length, 8)
    table = normal(1, vocab_size + padding, 8)
    num_targets = len(options.get("weights", [1.0]))
    targets = random_integers(-1, vocab_size, num_targets, 2, length)
    rows = {str(index): row for index, row in enumerate(targets)}

    def gradients(op, log_sum_exp):
        of_logits = loss_of(vocab_size, log_sum_exp, **options)

        def loss(hidden, table):
            objective, logged = op(of_logits, hidden, table, rows, dtype=dtype)
            total, _ = logged["0"]  # which has no derivative
            return 3 * objective + total, logged

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(hidden, table)

    log_sum_exp = plain.log_sum_exp
    expected = gradients(plain.head_loss, log_sum_exp)
    if variants.one_pass_statistics:
        log_sum_exp = one_pass_log_sum_exp
    fast = partial(head_loss, variants=variants, num_tokens=2 * chunk)
    actual = gradients(fast, log_sum_exp)
    assert_close(actual, expected, dtype)


@each_variant
def test_head_loss_equals_its_formula(platform):
    check = partial(check_head_loss, VARIANTS[platform])
    check("float32", 9, 4, 0, z_loss=0.3)
    check("float32", 7, 8, 5, softcap=3.0, z_loss=0.1)
    check("bfloat16", 1, 2, 2, softcap=3.0)
    weights = (1.0, 0.5, 0.25)
    check("float32", 9, 4, 2, softcap=3.0, z_loss=0.1, weights=weights)


def test_chunks_of_positions_divide_them():
    assert _choose_chunk(1024, 300) == 256
    assert _choose_chunk(1000, 128) == 125
    assert _choose_chunk(130, 64) == 26
    assert _choose_chunk(131, 64) == 131


def test_small_derivatives_of_the_head_survive_float16():
    hidden = 1 + normal(0, 1, 64, 16) / 16
    table = normal(1, 64, 16) / 64
    table = table.at[0].set(14 / 16)
    rows = {"targets": jnp.zeros((1, 64), jnp.int32)}  # others have e^-14, below 2^-14

    def gradient(op, dtype):
        def loss(table):
            total, _ = op(plain.cross_entropy, hidden, table, rows, dtype=dtype)
            return total / 64

        return jax.jit(jax.grad(loss))(table)[1:]

    fast = partial(head_loss, variants=CPU, num_tokens=64)
    actual = gradient(fast, "float16")
    expected = gradient(plain.head_loss, "float32")
    error = jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected)
    assert error < 2**-9  # of float16, 2^-11 for each of a few roundings


@pytest.mark.parametrize("jit", [jax.jit, lambda function: function])
def test_a_loss_with_parameters_to_learn_equals_its_formula(jit):
    hidden = normal(0, 2, 9, 8)
    table = normal(1, 13, 8)
    rows = {"targets": random_integers(-1, 11, 2, 9)}
    losses_of = loss_of(11, plain.log_sum_exp)

    def gradients(op, hidden, table, temperatures, step):
        def loss(hidden, table, temperatures):
            def of_logits(logits, rows):
                losses = losses_of(logits * temperatures, rows)
                return jax.tree.map(lambda x: x * step, losses)

            return op(of_logits, hidden, table, rows, dtype="float32")

        return jax.grad(loss, (0, 1, 2), has_aux=True)(hidden, table, temperatures)

    args = hidden, table, jnp.linspace(0.5, 2.0, 13), jnp.int32(2)
    fast = partial(head_loss, variants=CPU, num_tokens=8)  # in three chunks
    actual = jit(partial(gradients, fast))(*args)
    expected = jit(partial(gradients, plain.head_loss))(*args)
    assert_close(actual, expected)
    (_, _, temperatures), _ = expected
    assert jnp.abs(temperatures[:11]).min() > 1e-3


def test_logits_stored_in_bfloat16_cost_what_their_rounding_does():
    hidden = normal(0, 2, 64, 32)
    table = normal(1, 500, 32)
    rows = {"targets": random_integers(0, 500, 2, 64)}
    head = partial(head_loss, dtype="bfloat16", variants=CPU, num_tokens=512)

    @partial(jax.jit, static_argnums=3)
    @jax.value_and_grad
    def step(hidden, table, rows, logits_dtype):
        loss, _ = head(
            plain.cross_entropy, hidden, table, rows, logits_dtype=logits_dtype
        )
        return loss

    exact, expected = step(hidden, table, rows, "float32")
    rounded, actual = step(hidden, table, rows, "bfloat16")
    error = abs(exact - rounded)
    assert 0 < error < 2**-9 * exact  # half of bfloat16's last place
    assert_close(actual, expected, "bfloat16")
    table = 3 * table
    confident = table[None, :64]
    targets = {"targets": jnp.arange(64)[None]}
    loss, _ = step(confident, table, targets, "bfloat16")
    assert loss >= 0


def make_parts(*args, variants, **options):
    if variants.separate_qkv:
        return linear_separately(*args, variants=variants, **options)
    one = partial(linear, variants=variants)
    return plain.linear_parts(*args, linear=one, **options)


def test_platforms_have_programs_of_their_own():
    x = normal(0, 2, 8, 5)
    kernel = normal(1, 5, 3, 2, 7)

    def program(platform):
        variants = VARIANTS[platform]
        step = partial(make_parts, dtype="float32", variants=variants)
        return str(jax.make_jaxpr(step)(x, kernel))

    assert len({program(platform) for platform in VARIANTS}) == 3


@each_variant
@each_dtype
def test_parts_of_a_linear_equal_their_formula(platform, dtype):
    variants = VARIANTS[platform]

    def stacked(op, *args):
        return jnp.stack(op(*args, dtype=dtype))

    x = normal(0, 2, 8, 5)
    kernel = normal(1, 5, 3, 2, 7)
    bias = normal(2, 3, 2, 7)
    fast = partial(stacked, partial(make_parts, variants=variants))
    formula = partial(stacked, plain.linear_parts)
    assert_equal(fast, formula, (x, kernel, bias), dtype)


@each_variant
@each_dtype
def test_a_norm_survives_squares_that_overflow(platform, dtype):
    huge = jnp.full((1, 1, 40), 3e19, dtype)
    huge = huge.at[..., -1].set(0.0)
    ones = jnp.ones(40)
    y = norm(huge, ones, ones, dtype="float32", variants=VARIANTS[platform])
    assert jnp.isfinite(y).all()


@partial(jax.jit, static_argnums=0)
def slopes(function, x):
    gradient = jax.grad(lambda x: function(x).astype(jnp.float32))
    return jax.vmap(gradient)(x)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gelu_equals_its_formula_and_its_derivative_from_end_to_end(dtype):
    near = jnp.linspace(-12, 12, 999).astype(dtype)
    far = jnp.array([-6e4, -30.0, 30.0, 6e4], dtype)
    for x in (near, far):  # apart, because agreement is relative to the largest value
        assert_close(gelu_tanh(x), plain.gelu_tanh(x), dtype)
        assert_close(slopes(gelu_tanh, x), slopes(plain.gelu_tanh, x), dtype)
    farthest = [-1e18, -1e13, 1.3e13, 1e18]  # whose cubes overflow
    if dtype == "float16":
        farthest = [-6e4, 6e4]
    farthest = jnp.array(farthest, dtype)
    np.testing.assert_array_equal(slopes(gelu_tanh, farthest), farthest > 0)
