"""The model: kernels, seams, dropout, scanned layers, segments, and 16-bit types."""

import dataclasses
import inspect
import itertools
import re
from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.model import GPT, GPTConfig, ingredients, initial, with_kernels
from gpt2.model.flops import count_compute_parameters
from gpt2.model.ingredients import score_term_options
from gpt2.model.layers import named_param
from gpt2.model.one_device import ops_for
from gpt2.model.seams import Ingredient
from gpt2.ops import Ops, plain
from gpt2.ops import head_loss as head_loss_module
from gpt2.ops.head_loss import look_up_padded, pad_vocab
from gpt2.training.losses import next_token_loss
from gpt2.training.program import Program, draw_params
from gpt2.utils.scan import METRICS, report
from tests import numpy_model as in_numpy
from tests.helpers import (
    assert_rounded,
    batch_of,
    by_name,
    configured,
    first_params,
    random_params,
    thorough,
)
from tests.model.models import SMALL, logits_of, loss, mean_loss, replaced, step_of
from tests.model.switches import rolled, tokens_of

# Like `step_of`, but of a model in place of a config.
model_step = jax.jit(jax.value_and_grad(mean_loss, argnums=1), static_argnums=0)


@pytest.mark.thorough
@pytest.mark.parametrize("tied", [True, False])
def test_a_padded_table_gives_the_gradients_of_one_that_is_not(tied):
    config = replaced(tie_embeddings=tied, num_layers=1)
    vocab_size = config.vocab_size
    params = first_params(config)
    tokens = tokens_of(0)
    kernels = with_kernels(GPT(config))
    look_up = partial(look_up_padded, look_up=plain.look_up, vocab_size=vocab_size)
    pad = partial(pad_vocab, multiple=128, constrain=plain.constrain)
    ops = dataclasses.replace(kernels.ops, pad_vocab=pad, look_up_tokens=look_up)
    model = kernels.clone(ops=ops)
    program = jax.make_jaxpr(model_step, static_argnums=0)(model, params, tokens)
    assert "f32[384,32]" in str(program)
    expected = model_step(kernels, params, tokens)
    result = model_step(model, params, tokens)
    chex.assert_trees_all_close(result, expected, rtol=1e-5, atol=1e-6)
    for beyond in (vocab_size, -vocab_size - 1):
        wrong = tokens.at[0, 0].set(beyond)
        for each in (model, GPT(config)):
            loss, _ = model_step(each, params, wrong)
            assert jnp.isnan(loss)


def test_logits_of_a_large_batch_are_computed_a_chunk_at_a_time_and_change_nothing(
    monkeypatch,
):
    config = replaced(num_layers=1)
    params = first_params(config)
    tokens = tokens_of(1)

    def step(shape):
        """Return the loss and the gradients, after a check that logits have only this shape."""
        ops = ops_for.__wrapped__(config, jax.devices()[0])  # without its cache
        model = GPT(config, ops)
        run = jax.jit(jax.value_and_grad(lambda p: mean_loss(model, p, tokens)))
        program = str(jax.make_jaxpr(run)(params))
        assert set(re.findall(r"f32\[2,\d+,300\]", program)) == {shape}
        return run(params)

    whole = step("f32[2,16,300]")
    monkeypatch.setattr(head_loss_module, "CPU_TOKENS", 10)
    monkeypatch.setattr(head_loss_module, "CPU_LOGITS_BYTES", 0)
    chunked = step("f32[2,4,300]")
    chex.assert_trees_all_close(chunked, whole, atol=1e-6)


def test_without_jit_a_model_computes_by_the_reference():
    with jax.disable_jit():
        assert with_kernels(GPT(SMALL)).ops == Ops()
    assert with_kernels(GPT(SMALL)).ops != Ops()


@pytest.fixture
def use_ingredient(monkeypatch):
    """Return a function that replaces all ingredients by one."""

    def use(kind):
        monkeypatch.setattr(ingredients, "INGREDIENTS", (kind,))
        forget()

    def forget():
        ingredients.ingredients_of.cache_clear()
        initial.traced_draw.clear_cache()
        draw_params.clear_cache()

    yield use
    forget()


class Square(nn.Module):
    """A user's MLP: the sum of two maps, whose kernel is a batch of two matrices."""

    config: GPTConfig
    ops: Ops
    declares: bool = True

    @nn.compact
    def __call__(self, x):
        D = self.config.embed_dim
        draw = nn.initializers.normal(0.1)
        role = dict(inputs=(-2,), decays=True) if self.declares else {}
        axes = ("mix", "embed", "mlp")
        kernel = named_param(self, "own", draw, (2, D, D), axes, **role)
        return jnp.einsum("btd,edf->btf", nn.silu(x), kernel.astype(x.dtype))


class OwnMLP(Ingredient):
    option = "attention_sink"

    def mlp(self, block):
        return Square(block.config, block.ops, name="mlp")

    def branch(self, block, branch, context):
        if context.branch == "attention":
            return branch
        return branch._replace(sublayer=lambda x: self.mlp(block)(x))


def train_a_step(devices, options):
    """Return the parameters before and after a step, by default of Muon, and its metrics."""
    # RMSNorm, because centered rows would have a lower rank.
    config = configured(f"""
        model.vocab_size=64 model.context_length=16 model.num_layers=1 model.num_heads=2
        model.embed_dim=32 model.attention_sink=True model.norm=rmsnorm
        data.batch_size=8 optim.name=muon optim.warmup_steps=0 {options}""")
    program = Program.from_config(config, devices)
    state = program.init_state()
    first = jax.device_get(state.params)
    tokens = np.random.default_rng(0).integers(64, size=(8, 17), dtype=np.int32)
    batch = program.backend.put_batch(batch_of(tokens))
    step = program.compile_train(state, batch)
    state, metrics = step(state, batch)
    return first, jax.device_get(state.params), jax.device_get(metrics)


@pytest.mark.thorough
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_a_kernel_of_ones_own_is_gathered_by_layer_and_muons(use_ingredient, compute):
    use_ingredient(OwnMLP)
    options = f"precision.compute={compute}"
    sharded = f"{options} parallel.strategy=zero3 parallel.fsdp_gather=layer"
    first, last, _ = train_a_step(jax.devices(), sharded)
    mlp = last["h_0"]["mlp"]
    # Newton-Schulz leaves singular values between 0.68 and 1.21. Adam's would differ by far.
    update = mlp["own"] - first["h_0"]["mlp"]["own"]
    values = np.linalg.svd(update, compute_uv=False)
    assert values.shape == (2, 32)
    assert values.max() < 2 * values.min()
    if compute == "float32":
        _, expected, _ = train_a_step(jax.devices()[:1], options)
        # Rounding, times the largest singular value over the least.
        chex.assert_trees_all_close(mlp, expected["h_0"]["mlp"], atol=1e-5)


def undeclared(block):
    return Square(block.config, block.ops, declares=False, name="mlp")


def flax_layer(block):
    return nn.Dense(block.config.embed_dim, name="mlp")


@pytest.mark.parametrize(
    ("mlp", "message"),
    [
        (
            undeclared,
            r"parameter h_0/mlp/own .* neither `inputs` nor `decays`",
        ),
        (flax_layer, "h_0/mlp/bias does not name its axes"),
    ],
)
def test_a_parameter_without_a_role_or_axes_is_an_error(use_ingredient, mlp, message):
    class Own(OwnMLP):
        def mlp(self, block):
            return mlp(block)

    use_ingredient(Own)
    with pytest.raises(UserError, match=message):
        GPT(replaced(attention_sink=True)).logical_axes()


def init_of(model):
    """Return new parameters. `first_params` would return those of another ingredient."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return jax.jit(model.init)(jax.random.key(0), tokens)["params"]


class Factor(Ingredient):
    """A learned factor of each token's logits, and an auxiliary loss of their mean."""

    option = "attention_sink"

    def logits(self, seam, logits, context):
        vocab_size = self.config.vocab_size
        init = nn.initializers.constant(2.0)
        # An axis that devices split, and that is gathered by layer.
        factor = named_param(seam, "factor", init, (vocab_size,), ("table",))
        report(seam, "factor", factor[0])
        logits = factor * logits  # without padding
        squares = mean_squares(logits)
        report(seam, "square", squares.sum(), squares.size, weight=SQUARE_WEIGHT)
        return logits


SQUARE_WEIGHT = 0.25


def mean_squares(logits):
    """Return the square of the mean of each position's logits."""
    return jnp.square(logits.mean(-1))


def test_a_change_of_the_logits_may_have_a_parameter_and_report(use_ingredient):
    use_ingredient(Factor)
    config = replaced(num_layers=1)
    model = GPT(dataclasses.replace(config, attention_sink=True))
    tokens = tokens_of(1)
    batch = rolled(tokens)
    params = init_of(model)
    loss = next_token_loss(with_kernels(model))
    loss = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (objective, sums), grads = loss(params, batch)

    def by_hand(params):
        logits = GPT(config).apply({"params": params}, tokens)
        logits = params["logits_seam"]["factor"] * logits
        squares = mean_squares(logits).sum()
        loss, _ = plain.cross_entropy(logits, batch)
        return loss + SQUARE_WEIGHT * squares, squares

    step = jax.jit(jax.value_and_grad(by_hand, has_aux=True))
    (expected, squares), expected_grads = step(params)
    np.testing.assert_allclose(objective, expected, rtol=1e-6)
    chex.assert_trees_all_close(grads, expected_grads, atol=1e-5)
    assert jnp.abs(grads["logits_seam"]["factor"]).max() > 0.1
    assert sums["logits_seam/factor"] == (2.0, 1.0)
    # The sum is logged without its weight, and is no part of the logged loss.
    total, count = sums["logits_seam/square"]
    assert count == tokens.size
    np.testing.assert_allclose(total, squares, rtol=1e-5)
    loss, _ = sums["loss"]
    np.testing.assert_allclose(objective, loss + SQUARE_WEIGHT * total, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sharded",
    [
        "parallel.strategy=zero3 parallel.fsdp_gather=layer",
        "parallel.tensor=2",  # which pads the vocabulary
    ],
)
def test_a_change_of_the_logits_trains_in_shards(use_ingredient, sharded):
    use_ingredient(Factor)
    optimizer = "optim.name=sgd optim.learning_rate=1.0 optim.schedule=constant"
    first, last, metrics = train_a_step(jax.devices(), f"{optimizer} {sharded}")
    _, expected, expected_metrics = train_a_step(jax.devices()[:1], optimizer)
    assert metrics["train/logits_seam/factor"] == 2.0
    for name in ("train/loss", "train/logits_seam/square"):
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5)
    movement = expected["logits_seam"]["factor"] - first["logits_seam"]["factor"]
    assert np.abs(movement).max() > 0.001
    chex.assert_trees_all_close(last, expected, atol=1e-6)


class OnlySelf(Ingredient):
    """In the second layer, each position attends to nothing but itself."""

    option = "attention_sink"

    def score_terms(self, attention, terms, context):
        penalty = jnp.where(context.layer == 1, 1e4, 0.0)

        def term(scores, query, key):
            return scores - penalty * (query - key)

        return (*terms, term)

    def attention_output(self, attention, y, context):
        difference = y - context.heads.v  # 0 if a position attends only to itself
        report(attention, "difference", jnp.abs(difference).sum())
        return y


@pytest.mark.parametrize("scan_layers", [True, False])
def test_a_term_of_the_scores_may_depend_on_the_layer(use_ingredient, scan_layers):
    use_ingredient(OnlySelf)
    params = first_params(replaced(scan_layers=scan_layers))
    config = replaced(attention_sink=True, scan_layers=scan_layers)
    loss = next_token_loss(with_kernels(GPT(config)))
    _, sums = jax.jit(loss)(params, rolled(tokens_of(1)))
    first, _ = sums["h_0/attn/difference"]
    second, _ = sums["h_1/attn/difference"]
    assert first > 1
    assert second == 0


@pytest.mark.parametrize("scan_layers", [True, thorough(False)])
def test_every_seam_is_called_and_changes_nothing_by_default(
    use_ingredient, scan_layers
):
    config = replaced(position="rope", scan_layers=scan_layers)
    tokens = tokens_of(1)
    params = first_params(config)
    expected = mean_loss(GPT(config), params, tokens)
    called = set()

    def spy(name):
        def seam(self, *arguments):
            called.add(name)
            return getattr(Ingredient, name)(self, *arguments)

        return seam

    members = {"option": "attention_sink"}
    seams = set()
    for name, member in vars(Ingredient).items():
        if inspect.isfunction(member) and name != "__init__":
            seams.add(name)
            members[name] = spy(name)
    use_ingredient(type("Spy", (Ingredient,), members))
    config = dataclasses.replace(config, attention_sink=True)
    chex.assert_trees_all_equal(init_of(GPT(config)), params)
    assert mean_loss(GPT(config), params, tokens) == expected
    count_compute_parameters(config)
    assert score_term_options(config) == ("model.attention_sink",)
    assert called == seams


def test_every_layer_and_branch_drops_by_a_mask_of_its_own():
    config = replaced(scan_layers=True, dropout=0.5)
    tokens = tokens_of(1)

    def record(next_method, args, kwargs, context):
        y = next_method(*args, **kwargs)
        if isinstance(context.module, nn.Dropout):
            context.module.sow(METRICS, "mask", y != 0)
        return y

    with nn.intercept_methods(record):
        _, recorded = GPT(config).apply(
            {"params": first_params(config)},
            tokens,
            deterministic=False,
            rngs={"dropout": jax.random.key(0)},
            mutable=[METRICS],
        )
    masks = []
    for leaf in jax.tree.leaves(recorded):
        masks += [*np.reshape(leaf, (-1, *tokens.shape, config.embed_dim))]
    assert len(masks) == 1 + 2 * config.num_layers
    for mask in masks:
        assert 0.4 < mask.mean() < 0.6
    for one, other in itertools.combinations(masks, 2):
        assert 0.4 < (one == other).mean() < 0.6


@pytest.mark.parametrize(
    "switch", [{"smear": True}, {"position": "rope", "bigram_embeddings": 96}]
)
def test_segments_see_only_themselves(switch):
    config = replaced(**switch)
    params = random_params(config)
    tokens = tokens_of(1)
    segments = jnp.array([[0] * 6 + [1] * 10] * 2)
    together = logits_of(config, params, tokens, segments)
    rows = np.asarray(tokens)[:, 6:]

    def compute(params):
        return np.stack([in_numpy.logits(config, params, row) for row in rows])

    atol = assert_rounded(together[:, 6:], compute, params)
    without = logits_of(config, params, tokens)
    assert np.abs(together - without).max() > 100 * atol


@pytest.mark.parametrize(("dtype", "short"), [("bfloat16", "bf16"), ("float16", "f16")])
def test_narrow_compute_is_close_to_float32_and_leaves_float32_gradients(dtype, short):
    narrow = replaced(compute_dtype=dtype)
    params = first_params(SMALL)
    tokens = tokens_of(1)
    program = jax.make_jaxpr(loss, static_argnums=0)(narrow, params, tokens)
    assert re.search(rf"\b{short}\[", str(program))
    result, gradients = step_of(narrow, params, tokens)
    expected, expected_gradients = step_of(SMALL, params, tokens)
    np.testing.assert_allclose(result, expected, rtol=2e-3)
    chex.assert_trees_all_equal_dtypes(gradients, params)
    expected_gradients = by_name(expected_gradients)
    for path, gradient in by_name(gradients).items():
        error = np.abs(gradient - expected_gradients[path]).max()
        assert error < 0.05 * np.abs(expected_gradients[path]).max()


@pytest.mark.parametrize("activation", ["gelu_tanh", thorough("relu_squared")])
def test_the_reference_has_forward_derivatives_and_the_gradients_of_kernels(activation):
    config = replaced(attention="blocked", activation=activation, num_layers=1)
    params = first_params(config)
    tokens = tokens_of(1)

    def draw(x):
        return jax.random.normal(jax.random.key(x.size), x.shape)

    def loss_of(params):
        return mean_loss(GPT(config), params, tokens)

    direction = jax.tree.map(draw, params)
    # A kernel's own rule for the backward pass has no forward derivative.
    slope_of = jax.jit(lambda params: jax.jvp(loss_of, (params,), (direction,)))
    _, slope = slope_of(params)
    _, gradient = step_of(config, params, tokens)
    products = jax.tree.map(jnp.vdot, gradient, direction)
    np.testing.assert_allclose(slope, sum(jax.tree.leaves(products)), rtol=1e-4)
