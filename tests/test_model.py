"""The model: sizes, causality, caches, layouts of its layers, and its numbers in narrow types."""

import dataclasses
import functools
import importlib
from types import SimpleNamespace

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.model import GPT, GPTConfig, layers, num_params, resolve_attention
from gpt2.utils.platform import plain_ops
from tests.helpers import thorough

SMALL = GPTConfig(
    vocab_size=300, context_length=16, num_layers=2, num_heads=2, embed_dim=32
)


def replaced(**changes):
    return dataclasses.replace(SMALL, **changes)


def tokens_of(seed):
    return jax.random.randint(jax.random.key(seed), (2, 16), 0, SMALL.vocab_size)


@functools.cache
def init(config):
    return jax.jit(GPT(config).init)(jax.random.key(0), tokens_of(0))["params"]


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config, params, tokens, segments=None):
    return GPT(config).apply({"params": params}, tokens, segments=segments)


@functools.partial(jax.jit, static_argnums=0)
def loss(config, params, tokens, key=None):
    """The mean loss of predicting each token from those before; with dropout if there is a key."""
    options = {} if key is None else {"deterministic": False, "rngs": {"dropout": key}}
    targets = jnp.roll(tokens, -1, axis=1)
    sums = GPT(config).apply(
        {"params": params}, tokens, targets, method="loss", **options
    )
    total, count = sums["loss"]
    return total / count


gradient_of = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)


@pytest.mark.parametrize("tied", [True, thorough(False)])
def test_a_padded_table_gives_the_gradients_of_one_that_is_not(monkeypatch, tied):
    config = replaced(tie_embeddings=tied)
    params, tokens = init(config), tokens_of(0)

    def program(tokens=tokens):
        step = jax.value_and_grad(loss.__wrapped__, argnums=1)
        return jax.jit(lambda params: step(config, params, tokens))

    def barriers():
        return str(jax.make_jaxpr(program())(params)).count("optimization_barrier")

    expected, unpadded = program()(params), barriers()
    monkeypatch.setattr(layers, "vocab_multiple", lambda: 128)
    assert config.vocab_size % 128 and barriers() == unpadded + 1
    chex.assert_trees_all_close(program()(params), expected, rtol=1e-5, atol=1e-6)
    for beyond in (config.vocab_size, -config.vocab_size - 1):
        assert jnp.isnan(program(tokens.at[0, 0].set(beyond))(params)[0])


def test_logits_of_a_large_batch_are_computed_a_chunk_at_a_time_and_change_nothing(
    monkeypatch,
):
    params, tokens = init(SMALL), tokens_of(1)

    def traced():
        def mean_loss(params):
            return loss.__wrapped__(SMALL, params, tokens)

        run = jax.jit(jax.value_and_grad(mean_loss))
        return str(jax.make_jaxpr(run)(params)), run(params)

    whole_jaxpr, whole = traced()
    module = importlib.import_module("gpt2.ops.cross_entropy")  # not the function
    monkeypatch.setattr(module, "CPU_ROWS", 10)
    monkeypatch.setattr(module, "CPU_LOGITS_BYTES", 0)
    chunked_jaxpr, chunked = traced()
    assert "f32[2,16,300]" in whole_jaxpr and "f32[2,4,300]" not in whole_jaxpr
    assert "f32[2,4,300]" in chunked_jaxpr and "f32[2,16,300]" not in chunked_jaxpr
    chex.assert_trees_all_close(chunked, whole, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("unroll", [2, 4])
def test_turns_of_several_layers_equal_turns_of_one(unroll):
    one, several = (
        replaced(num_layers=4, scan_layers=True, scan_unroll=n) for n in (1, unroll)
    )
    params, tokens = init(one), tokens_of(1)
    text = loss.lower(several, params, tokens).as_text()
    assert ("stablehlo.while" in text) == several.loops_over_layers == (unroll < 4)
    gradients = (gradient_of(config, params, tokens) for config in (several, one))
    chex.assert_trees_all_close(*gradients, atol=2e-6)


@pytest.mark.parametrize(
    "switch",
    [
        {"smear": True},
        {"position": "rope", "bigram_embeddings": 96},
        {"position": "sinusoidal"},
    ],
)
def test_segments_see_only_themselves(switch):
    config = replaced(**switch)
    params, tokens = jax.tree.map(lambda x: x + 0.1, init(config)), tokens_of(1)
    segments = (jnp.arange(16) >= 6).astype(jnp.int32)[None].repeat(2, axis=0)
    together = logits_of(config, params, tokens, segments)
    np.testing.assert_allclose(
        together[:, 6:], logits_of(config, params, tokens[:, 6:]), atol=3e-5
    )
    assert np.abs(together - logits_of(config, params, tokens)).max() > 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_compute_is_close_to_float32_and_leaves_float32_gradients(dtype):
    narrow = replaced(compute_dtype=dtype)
    params, tokens = init(SMALL), tokens_of(1)
    text = str(jax.make_jaxpr(loss, static_argnums=0)(narrow, params, tokens))
    assert {"bfloat16": "bf16[", "float16": "f16["}[dtype] in text
    np.testing.assert_allclose(
        loss(narrow, params, tokens), loss(SMALL, params, tokens), rtol=2e-3
    )
    grads, exact = (
        gradient_of(narrow, params, tokens),
        gradient_of(SMALL, params, tokens),
    )
    chex.assert_trees_all_equal_dtypes(grads, params)
    error = jax.tree.map(
        lambda a, b: jnp.abs(a - b).max() / jnp.abs(b).max(), grads, exact
    )
    assert max(jax.tree.leaves(error)) < 0.05


@pytest.mark.parametrize("activation", ["gelu_tanh", thorough("relu_squared")])
def test_plain_operations_have_forward_derivatives_and_the_same_gradients(activation):
    config = replaced(attention="blocked", activation=activation)
    params, tokens = init(config), tokens_of(1)
    direction = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params
    )

    def mean_loss(params):
        return loss.__wrapped__(config, params, tokens)

    def product(a, b):
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)))

    def slopes(params, direction):
        along = (params,), (direction,)
        return jax.jvp(mean_loss, *along)[1], jax.jvp(jax.grad(mean_loss), *along)[1]

    def curvature(params):  # by two backward passes
        return jax.grad(lambda params: product(jax.grad(mean_loss)(params), direction))(
            params
        )

    with pytest.raises(TypeError, match="custom_vjp"):
        slopes(params, direction)
    with plain_ops():
        slope, along = jax.jit(slopes)(params, direction)
        expected = jax.jit(curvature)(params)
    gradient = gradient_of(config, params, tokens)
    np.testing.assert_allclose(slope, product(gradient, direction), rtol=1e-4)
    for found, wanted in zip(*map(jax.tree.leaves, (along, expected)), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-3 * np.abs(wanted).max())


def test_flax_tabulates_the_model_with_its_operations():
    table = nn.tabulate(GPT(SMALL), jax.random.key(0), compute_flops=True)(tokens_of(0))
    assert "flops" in table and f"{num_params(init(SMALL)):,}" in table


@pytest.mark.parametrize(
    ("kind", "platform", "capability", "expected"),
    [
        ("TPU v3", "tpu", {}, "xla"),
        ("TPU v5 lite", "tpu", {}, "splash"),
        ("Tesla T4", "gpu", {"compute_capability": "7.5"}, "xla"),
        ("NVIDIA L4", "cuda", {"compute_capability": "8.9"}, "cudnn"),
    ],
)
def test_older_devices_take_attention_that_they_can_compile(
    kind, platform, capability, expected
):
    device = SimpleNamespace(device_kind=kind, platform=platform, **capability)
    cfg = replaced(compute_dtype="bfloat16", context_length=128)
    assert resolve_attention(cfg, device) == expected
