"""Shapes and types: known ones at OpenAI's sizes, and errors for wrong ones. Little is computed."""

import dataclasses
from functools import partial
from unittest import mock

import chex
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from gpt2.config import SIZES
from gpt2.model import KVCache, extend, gpt, layers, num_params
from gpt2.model.attention import Attention
from gpt2.model.gpt import make_context
from gpt2.model.seams import Heads, Ingredient
from gpt2.ops import Ops, plain
from gpt2.ops.head_loss import head_loss
from gpt2.ops.linear import linear
from gpt2.ops.norm import norm
from gpt2.ops.variants import VARIANTS
from gpt2.training.program import Program
from tests.helpers import configured, thorough
from tests.model.switches import model_of

TOTALS = {"gpt2-124m": 124_439_808, "gpt2-1558m": 1_557_611_200}
WRONG = (AssertionError, ValueError, TypeError, flax.errors.ScopeParamShapeError)

shapes = partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
each_model = pytest.mark.parametrize(
    ("size", "scanned"),
    [("gpt2-124m", True), ("gpt2-124m", False), thorough("gpt2-1558m", True)],
)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, "int32")


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


@each_model
def test_state_has_the_known_parameters_and_two_moments_of_each_with_every_axis_named(
    size, scanned
):
    L, N, D = SIZES[size]
    tensor = 1 if N % 2 else 2  # gpt2-1558m has 25 heads
    config = configured(f"""
        model.vocab_size=50257 model.num_layers={L} model.num_heads={N}
        model.embed_dim={D} precision.compute=bfloat16 memory.scan_layers={scanned}
        data.batch_size=16 parallel.data=2 parallel.fsdp={4 // tensor}
        parallel.tensor={tensor}""")
    state = Program.from_config(config, jax.devices()).state_shapes
    assert num_params(state.params) == TOTALS[size]
    for leaf in jax.tree.leaves(state.params):
        assert leaf.dtype == "float32"
        assert len(leaf.sharding.spec) == leaf.ndim
    for name in ("mu", "nu"):
        moment = optax.tree.get(state.opt_state, name)
        chex.assert_trees_all_equal_shapes_and_dtypes(moment, state.params)
    assert state.loss_scale is None


@pytest.mark.parametrize(
    "name", ["two experts", thorough("modded"), thorough("untied")]
)
@pytest.mark.parametrize("make_key", [jax.random.key, thorough(jax.random.PRNGKey)])
def test_parameters_that_are_drawn_together_are_those_that_flax_draws(
    monkeypatch, name, make_key
):
    model = model_of(name)
    tokens = jnp.zeros((1, 1), jnp.int32)

    def trace():
        return jax.jit(lambda key: model.init(key, tokens)).trace(make_key(7))

    together = trace()
    monkeypatch.setattr(gpt, "defer", plain.param)
    by_flax = trace()
    assert "scan[" in str(together.jaxpr)  # the loop over layers
    assert "scan[" not in str(by_flax.jaxpr)
    chex.assert_trees_all_equal(
        *(traced.lower().compile()(make_key(7)) for traced in (together, by_flax))
    )


def test_a_table_of_modules_can_be_printed_twice():
    model = model_of("default")
    tokens = jnp.zeros((1, 16), jnp.int32)
    first, second = (nn.tabulate(model, jax.random.key(0))(tokens) for _ in range(2))
    assert "Block" in first
    assert second == first


def attend(q, k, v):
    """Apply attention to these queries, keys and values."""
    ingredient = Ingredient(CONFIG)
    ingredient.heads = lambda *_: Heads(q, k, v)
    module = Attention(CONFIG, Ops())
    x = jnp.zeros((2, 8, 32))
    context = make_context(jnp.zeros((2, 8), int))
    with mock.patch("gpt2.model.attention.ingredients_of", lambda _: [ingredient]):
        return module.init_with_output(jax.random.key(0), x, context)


def small():
    """Return the program of a small model: B 2, T 8 of 16, D 32, N 2, H 16, V 300."""
    config = configured("""
        model.vocab_size=300 model.context_length=16 model.num_layers=2
        model.num_heads=2 model.embed_dim=32 data.batch_size=2""")
    return Program.from_config(config, jax.devices()[:1])


PROGRAM = small()
MODEL = PROGRAM.model
STATE = shapes(PROGRAM.state_shapes)
CONFIG = MODEL.config
PARAMS = {"params": STATE.params}


def cache_of(batch_size, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return jax.eval_shape(partial(KVCache.create, config, batch_size, 16))


def apply_mlp(x):
    return layers.MLP(CONFIG, Ops()).init_with_output(jax.random.key(0), x)


CPU = VARIANTS["cpu"]
apply_linear = partial(linear, dtype="float32", variants=CPU)
apply_norm = partial(norm, dtype="float32", variants=CPU)


def score(hidden, table):
    def loss(logits, rows):
        return plain.cross_entropy(plain.mask_padding(logits, 11), rows)

    rows = {"targets": jnp.zeros((2, 8), jnp.int32)}
    return head_loss(
        loss, hidden, table, rows, dtype="float32", variants=CPU, num_tokens=512
    )


def loss_of_model(params, tokens, targets):
    rows = {"tokens": tokens, "targets": targets}
    return MODEL.apply(params, rows, method="loss")


def in_segments(params, tokens, segments):
    return MODEL.apply(params, tokens, segments=segments)


def train_step(state, tokens, targets, segments):
    rows = {"tokens": tokens, "targets": targets, "segments": segments}
    return PROGRAM.train_step(state, rows)


BORDERS = {}  # by name: a function, its arguments, and wrong arguments by index


def border(name, function, *arguments, **wrong):
    """Add a border. `wrong` are lists of wrong arguments, by the position of an argument."""
    BORDERS[name] = function, arguments, wrong


X = floats(2, 8, 32)
ROWS = ints(2, 8)
LENGTHS = ints(2)
Q = floats(2, 8, 2, 16)
KERNEL = floats(32, 3, 5)
BIAS = floats(3, 5)
VECTOR = floats(32)
TABLE = floats(12, 32)
CACHE = cache_of(2)
# Wrong arguments, of which most would broadcast.
NOT_X = [floats(2, 8, 1), floats(2, 8, 31)]
NOT_ROWS = [ints(1, 8), ints(2, 1), ints(8), floats(2, 8)]
NOT_TOKENS = [ints(8), ints(2, 17), floats(2, 8)]
NOT_LENGTHS = [ints(1), ints(2, 1)]
NOT_Q = [floats(1, 8, 2, 16), floats(2, 1, 2, 16), floats(2, 8, 2, 1)]
NOT_Q.append(jax.ShapeDtypeStruct(Q.shape, "bfloat16"))
NOT_K = [*NOT_Q, floats(2, 8, 1, 16)]
NOT_CACHE = [cache_of(1), CACHE.replace(length=ints(1))]
NOT_CACHE.append(cache_of(2, num_heads=4))
NOT_CACHE.append(cache_of(2, compute_dtype="bfloat16"))
NOT_VECTOR = [floats(1), floats(8, 32)]
NOT_BIAS = [floats(5), floats(8, 3, 5)]
NOT_KERNEL = [floats(1, 3, 5)]
NOT_TABLE = [floats(10, 32), floats(12, 1)]

border("apply", MODEL.apply, PARAMS, ROWS, second=NOT_TOKENS)
border("loss", loss_of_model, PARAMS, ROWS, ROWS, second=NOT_ROWS, third=NOT_ROWS)
border(
    "extend",
    partial(extend, MODEL),
    STATE.params,
    ROWS,
    LENGTHS,
    CACHE,
    second=NOT_TOKENS,
    third=NOT_LENGTHS,
    fourth=NOT_CACHE,
)
border("MLP", apply_mlp, X, first=[*NOT_X, floats(8, 32)])
border("segments", in_segments, PARAMS, ROWS, ROWS, second=NOT_TOKENS, third=NOT_ROWS)
border(
    "linear",
    apply_linear,
    X,
    KERNEL,
    BIAS,
    first=NOT_X,
    second=NOT_KERNEL,
    third=NOT_BIAS,
)
border(
    "norm",
    apply_norm,
    X,
    VECTOR,
    VECTOR,
    first=[*NOT_X, ints(2, 32)],
    second=NOT_VECTOR,
    third=NOT_VECTOR,
)
border("head_loss", score, X, TABLE, first=[*NOT_X, floats(8, 32)], second=NOT_TABLE)
border(
    "train step",
    train_step,
    STATE,
    ROWS,
    ROWS,
    ROWS,
    second=NOT_ROWS,
    third=NOT_ROWS,
    fourth=NOT_ROWS,
)
border("attention", attend, Q, Q, Q, first=NOT_Q, second=NOT_K, third=NOT_K)

POSITIONS = ("first", "second", "third", "fourth")


@pytest.mark.parametrize("name", BORDERS)
def test_a_wrong_shape_or_type_is_refused_where_the_right_one_passes(name):
    function, right, wrong = BORDERS[name]
    jax.eval_shape(function, *right)
    for position, others in wrong.items():
        for other in others:
            arguments = [*right]
            arguments[POSITIONS.index(position)] = other
            with pytest.raises(WRONG):
                result = jax.eval_shape(function, *arguments)
                pytest.fail(f"{name} accepts {other} as {position} argument: {result}")
