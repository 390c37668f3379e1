"""Shapes and types at every border, at OpenAI's sizes; a wrong one raises. Almost nothing runs."""

import dataclasses
from functools import partial
from unittest import mock

import chex
import flax.errors
import jax
import jax.numpy as jnp
import optax
import pytest

from gpt2.config import SIZES
from gpt2.model import KVCache, extend, layers, num_params
from gpt2.model.attention import Attention
from gpt2.model.seams import Context, Heads, Ingredient
from gpt2.ops import Ops, plain
from gpt2.ops.head_loss import head_loss
from gpt2.ops.linear import linear
from gpt2.ops.norm import norm
from gpt2.ops.variants import VARIANTS
from gpt2.parallel.kernels import get_attention
from gpt2.training.program import Program
from tests.helpers import configured, thorough

TOTALS = dict(
    zip(SIZES, (124_439_808, 354_823_168, 774_030_080, 1_557_611_200), strict=True)
)
T = 1024
V = 50257
IMPLEMENTATIONS = ("plain", "blocked", "splash")
WRONG = (AssertionError, ValueError, TypeError, flax.errors.ScopeParamShapeError)

shapes = partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
each_model = pytest.mark.parametrize(
    ("size", "scanned"),
    [("gpt2-124m", True), ("gpt2-124m", False), thorough("gpt2-1558m", True)],
)


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


ints, floats, halves = (
    partial(array, dtype) for dtype in ("int32", "float32", "bfloat16")
)


def assert_same(actual, expected):
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes(actual), shapes(expected))


def known_parameters(size, scanned):
    L, N, D = SIZES[size]
    (H, F), ln = (D // N, 4 * D), {"scale": floats(D), "bias": floats(D)}
    qkv = {"kernel": floats(D, 3, N, H), "bias": floats(3, N, H)}
    out = {"kernel": floats(N, H, D), "bias": floats(D)}
    widen = {"kernel": floats(D, F), "bias": floats(F)}
    narrow = {"kernel": floats(F, D), "bias": floats(D)}
    attn = {"c_attn": qkv, "c_proj": out}
    mlp = {"c_fc": widen, "c_proj": narrow}
    layer = {"ln_1": ln, "attn": attn, "ln_2": ln, "mlp": mlp}
    rest = {
        "wte": {"embedding": floats(V, D)},
        "wpe": {"embedding": floats(T, D)},
        "ln_f": ln,
    }
    if scanned:
        return rest | {"h": jax.tree.map(lambda x: floats(L, *x.shape), layer)}
    return rest | {f"h_{i}": layer for i in range(L)}


@each_model
def test_state_is_the_known_parameters_and_two_moments_of_each_with_every_axis_named(
    size, scanned
):
    L, N, D = SIZES[size]
    tensor = 1 if N % 2 else 2  # gpt2-1558m has 25 heads
    config = configured(f"""
        model.vocab_size={V} model.num_layers={L} model.num_heads={N}
        model.embed_dim={D} precision.compute=bfloat16 memory.scan_layers={scanned}
        data.batch_size=16 parallel.data=2 parallel.fsdp={4 // tensor}
        parallel.tensor={tensor}""")
    state = Program.from_config(config, jax.devices()).state_shapes
    assert num_params(state.params) == TOTALS[size]
    assert_same(state.params, known_parameters(size, scanned))
    for moment in ("mu", "nu"):
        assert_same(optax.tree.get(state.opt_state, moment), state.params)
    assert all(len(x.sharding.spec) == x.ndim for x in jax.tree.leaves(state.params))
    assert state.step.dtype == "int32" and not state.step.shape
    assert state.loss_scale is None


def attend(name):
    """Returns attention of queries, keys and values that an ingredient gives."""

    def attended(q, k, v):
        extra = Ingredient(CONFIG)
        extra.heads = lambda *_: Heads(q, k, v)
        ops = Ops(attention=get_attention(name, "cpu"))
        context = Context(jnp.zeros((2, 128), int), jnp.arange(128)[None])
        with mock.patch("gpt2.model.attention.ingredients_of", lambda _: (extra,)):
            make = Attention(CONFIG, ops).init_with_output
            return make(jax.random.key(0), jnp.zeros((2, 128, 32)), context)[0]

    return attended


def small(accumulate_steps=1):
    """The program of a small model: B 2, T 8 of 16, D 32, N 2, H 16, V 300."""
    config = configured(f"""
        model.vocab_size=300 model.context_length=16 model.num_layers=2
        model.num_heads=2 model.embed_dim=32 data.batch_size=2
        train.accumulate_steps={accumulate_steps}""")
    return Program.from_config(config, jax.devices()[:1])


MODEL = small().model
STATE = shapes(small().state_shapes)
CONFIG = MODEL.config
PARAMS = {"params": STATE.params}


def cache_of(batch_size, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return jax.eval_shape(partial(KVCache.create, config, batch_size, 16))


def module(kind, *fields):
    made = kind(CONFIG, Ops(), *fields)
    return lambda *args: made.init_with_output(jax.random.key(0), *args)[0]


CPU = VARIANTS["cpu"]


def score(hidden, table):
    def loss(logits, rows):
        return plain.cross_entropy(plain.hide_padding(logits, 11), rows)

    how = dict(dtype="float32", variants=CPU, num_rows=512)
    rows = {"targets": jnp.zeros((2, 8), jnp.int32)}
    return head_loss(loss, hidden, table, rows, **how)


def loss_of_model(params, tokens, targets):
    rows = {"tokens": tokens, "targets": targets}
    return MODEL.apply(params, rows, method="loss")


def in_segments(params, tokens, segments):
    return MODEL.apply(params, tokens, segments=segments)


def on_batch(step):
    names = ("tokens", "targets", "segments")
    return lambda state, *arrays: step(state, dict(zip(names, arrays, strict=True)))


def all_of(make, *others):
    return [make(*shape) for shape in others]


X = floats(2, 8, 32)
ROWS = ints(2, 8)
LENGTHS = ints(2)
Q = floats(2, 128, 2, 16)
W = floats(32, 3, 5)
WB = floats(3, 5)
VECTOR = floats(32)
TABLE = floats(12, 32)
# What is wrong in the place of each: first whatever broadcasts.
NOT_X = all_of(floats, (2, 8, 1), (2, 8, 31))
NOT_ROWS = [*all_of(ints, (1, 8), (2, 1), (8,), (2, 8, 1)), floats(2, 8)]
NOT_TOKENS = [ints(8), ints(2, 8, 1), ints(2, 17), floats(2, 8)]
NOT_LENGTHS = all_of(ints, (1,), (2, 1))
NOT_Q = all_of(floats, (1, 128, 2, 16), (2, 1, 2, 16), (2, 128, 2, 1))
NOT_Q += [floats(2, 128, 32), halves(2, 128, 2, 16)]
NOT_K = [*NOT_Q, floats(2, 128, 1, 16), floats(2, 128, 3, 16)]
NOT_CACHE = [cache_of(1), cache_of(2).replace(length=ints(1))]
NOT_CACHE += [cache_of(2, num_heads=4), cache_of(2, compute_dtype="bfloat16")]
NOT_VECTOR = all_of(floats, (), (1,), (8, 32))
NOT_BIAS = all_of(floats, (), (5,), (8, 3, 5))
NOT_W = [floats(1, 3, 5), floats(5, 32)]
NOT_TABLE = all_of(floats, (10, 32), (12, 1), (32, 12))
EXTEND = (STATE.params, ROWS, LENGTHS, cache_of(2))
NOT_BATCH = NOT_ROWS, NOT_ROWS, NOT_ROWS
BORDERS = {
    "apply": (MODEL.apply, (PARAMS, ROWS), (), NOT_TOKENS),
    "loss": (
        loss_of_model,
        (PARAMS, ROWS, ROWS),
        (),
        NOT_ROWS,
        NOT_ROWS,
    ),
    "extend": (
        partial(extend, MODEL),
        EXTEND,
        (),
        NOT_TOKENS,
        NOT_LENGTHS,
        NOT_CACHE,
    ),
    "MLP": (module(layers.MLP), (X,), [*NOT_X, floats(8, 32)]),
    "segments": (in_segments, (PARAMS, ROWS, ROWS), (), NOT_TOKENS, NOT_ROWS),
    "linear": (
        partial(linear, dtype="float32", variants=CPU),
        (X, W, WB),
        NOT_X,
        NOT_W,
        NOT_BIAS,
    ),
    "norm": (
        partial(norm, dtype="float32", variants=CPU),
        (X, VECTOR, VECTOR),
        [*NOT_X, ints(2, 32)],
        NOT_VECTOR,
        NOT_VECTOR,
    ),
    "head_loss": (
        score,
        (X, TABLE),
        [*NOT_X, floats(8, 32)],
        NOT_TABLE,
    ),
    "train": (on_batch(small().train_step), (STATE, ROWS, ROWS, ROWS), (), *NOT_BATCH),
    "train 2": (
        on_batch(small(2).train_step),
        (STATE, ROWS, ROWS, ROWS),
        (),
        *NOT_BATCH,
    ),
    "eval": (
        on_batch(small().eval_step),
        (STATE.params, ROWS, ROWS, ROWS),
        (),
        *NOT_BATCH,
    ),
}
for name in IMPLEMENTATIONS:
    BORDERS[name] = (
        attend(name),
        (Q, Q, Q),
        NOT_Q,
        NOT_K,
        NOT_K,
    )


@pytest.mark.parametrize("name", BORDERS)
def test_a_wrong_shape_or_type_is_refused_where_the_right_one_passes(name):
    function, right, *wrong = BORDERS[name]
    jax.eval_shape(function, *right)
    for index, others in enumerate(wrong):
        for other in others:
            arguments = (*right[:index], other, *right[index + 1 :])
            with pytest.raises(WRONG):
                taken = jax.eval_shape(function, *arguments)
                pytest.fail(
                    f"{name} takes {other} as argument {index} and gives {taken}"
                )
